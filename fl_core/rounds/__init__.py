"""One round end to end: the round loop (server side), the silo half, sampling, the frozen run manifest and the."""
