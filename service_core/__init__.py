"""The parts of a service that do not depend on federated learning: identity, encryption, storage, logs, health.

pki/        keys, certificates, names, the signed roster, invitations, signing by hand
tls/        TLS 1.3, proxies, and why a connection fails
storage/    bytes on disk: digests, private files, objects, SQLite
audit_log/  a log of all calls: hash-chained lines, heads signed for the other side, the commands that read them
operations/ checks of a machine, health, logs, exit statuses
workers/    processes that a service starts to compute: lines over their pipes, calls in both directions

`console` prints for both command lines; `version` has the protocol number.
"""
