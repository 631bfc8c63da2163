"""KFP components: one file each, with a signature and one call into `tidemill.steps`.

The compiled pipeline contains the source of a component, which runs in `IMAGE`, where Tidemill is installed. So
components import only KFP at module level.
"""

IMAGE = "tidemill-python:0.1.0"
"""The image of the steps. KFP's local runner refuses an image without "python" in its name."""
