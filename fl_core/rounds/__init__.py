"""One round end to end, and what both sides agree on before the first.

There is only one round loop: the service and the simulation differ only in their ports and observers. The manifest is
the frozen description of a run; the layout is the public shape of every update.
"""
