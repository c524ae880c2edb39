"""Runs while they run: the scheduler, one run and its open round, plain and masked rounds, tasks, the dispatcher."""
