"""The coordinator: the service that runs rounds, and the consortium's command line.

cli/         one module per group of commands; nothing imports it
config/      from words on the command line to the frozen manifest
api/         the gRPC surface: server, authorization, one file per service, values as messages
runs/        runs while they run: scheduler, dispatcher to silos, sessions, checkpoints
storage/     what is kept: SQLite tables and transactions, objects, uploads
lead/        what a lead sees of runs: client, tables, JSON, progress, surveys
operations/  health of the running service
pki/         the certificate authority and the membership
"""
