"""The coordinator: the service that runs rounds, and the consortium's command line.

cli/         one module per group of commands; nothing imports it
config/      turns words of the command line into a frozen manifest
api/         the gRPC interface: server, authorization, one file per service, conversion to messages
runs/        running runs: scheduler, the silos' sessions, rounds, tasks, workers
worker/      the arithmetic of one run, in a process of its own
storage/     SQLite tables and transactions, objects, uploads
lead/        a lead's view of runs: client, tables, JSON, progress, surveys
operations/  health and metrics of the running service
pki/         the certificate authority and the membership
"""
