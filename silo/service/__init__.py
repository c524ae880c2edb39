"""The threads of `silo serve`: the task queue, the task runner, the membership, and response timing."""
