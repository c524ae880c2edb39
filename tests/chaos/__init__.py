"""A federation of real processes that is disturbed at random times: `python -m tests.chaos --minutes 10 --seed 1`.

`plan` draws what happens and when, `proxy` is the line between a hospital and the coordinator, `federation` the
processes and how each fault is done to them, `checks` what must hold after each run, `shifted` a process with a wrong
clock.
"""
