"""Running runs: the scheduler, a run and its open round, plain and masked rounds, tasks, the dispatcher."""
