"""The coordinator: the service that runs rounds, and the consortium's command line.

cli/         one module per group of commands; nothing imports it
config/      from words on the command line to the frozen manifest
api/         the gRPC interface: server, authorization, one file per service, conversion to messages
runs/        running runs: scheduler, dispatcher to silos, sessions, checkpoints
worker/      the arithmetic of one run, in a process of its own
storage/     SQLite tables and transactions, objects, uploads
lead/        what a lead sees of runs: client, tables, JSON, progress, surveys
operations/  health and metrics of the running service
pki/         the certificate authority and the membership
"""
