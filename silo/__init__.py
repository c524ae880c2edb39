"""One hospital's service: it dials the coordinator, trains on data that never leaves, and owns its budget.

cli/         commands and their output; nothing imports it
service/     the threads of `silo serve`: task queue, task runner, membership, response timing
admission/   the single entry point for runs: policy, decisions, floors, and the memory of earlier answers
training/    an admitted task: its data, training, local evaluation
worker/      the process that reads records, in a cage: the work of one task after the other
connection/  gRPC: connection, session, transfer, retries
identity/    the hospital's key, its certificate, and the keys of other members that it accepts
pacs/        images in a PACS: searched, fetched, and listed for each run
reports/     what the page and the commands both show
operations/  the doctor, monitoring, liveness
storage/     the home folder, the database, the outbox
"""
