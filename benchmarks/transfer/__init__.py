"""The load of `message_queue.py`, and the process that puts it on verl's queue."""
