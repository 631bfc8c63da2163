"""KFP components: one thin file each, a signature and one call into Tidemill.

A component's source travels inside the compiled pipeline and runs in `IMAGE`, which has Tidemill installed; so at
module level they import nothing but KFP.
"""

IMAGE = "tidemill-python:0.1.0"
"""The slim image of the steps. KFP's local runner takes an image without "python" in its name for a foreign one."""
