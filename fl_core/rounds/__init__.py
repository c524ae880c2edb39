"""A round from end to end, and the terms that both sides agree on before the first one.

There is only one round loop: the service and the simulation differ only in their ports and observers. The manifest is
the frozen description of a run; the layout is the public shape of every update.
"""
