"""What every service has and no federation is in: identity, encryption, storage, logs, health.

pki/        keys, certificates, names, the signed roster, invitations, signing by hand
tls/        TLS 1.3, proxies, and why a connection fails
storage/    bytes on disk: digests, private files, objects, SQLite
audit_log/  who called or ordered what: lines in a chain, heads signed for the other side, the commands that read them
operations/ checks of a machine, health, logs, exit statuses

`console` is what both command lines print with; `version` has the number of the protocol.
"""
