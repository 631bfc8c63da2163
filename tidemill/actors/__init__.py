"""The Ray actors of a run, and how the driver speaks to them.

Every actor is a thin shell around a plain class that knows nothing of Ray. Every `Remote...` class implements a
protocol of `tidemill.protocols` over an actor handle; Ray's errors become Tidemill's, with the remote traceback.
"""
