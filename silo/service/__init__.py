"""The threads: task queue, task runner, membership maintenance."""
