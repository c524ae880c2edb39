"""One hospital's service: it dials the coordinator, trains on data that never leaves, and owns its budget.

cli/         commands and their output; nothing imports it
service/     the threads of `silo serve`: task queue, task runner, membership, when to speak
admission/   the one door: what a run asks, what the hospital answers, and its memory of that
training/    a task at the hospital, once it is admitted: its data, training, what was measured
connection/  everything that talks gRPC: connection, session, transfer, when to try again
identity/    the hospital's key, its certificate, and the keys of others that it accepts
reports/     what the page and the commands say alike
operations/  the doctor, the log, and whether the service lives
storage/     the home folder, the database, the outbox
"""
