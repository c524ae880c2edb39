"""Runs while they run.

The scheduler drives the round loop of each run in a thread; a port per silo hands its tasks to the dispatcher, which
offers them over the silo's session; the checkpointer stores what a round changed before anybody hears of it.
"""
