"""What both services share.

consilium/  generated from `consilium/v1/federation.proto` by `make protos`
wire/       bytes on the wire: chunks, update files, receipts, status codes
pki/        keys, certificates, names, the signed roster, invitations, signing by hand
tls/        TLS 1.3, proxies, and why a connection fails
operations/ checks of a machine, health, logs, exit statuses
audit_log/  who called or ordered what: lines in a chain, heads signed for the other side, the commands that read them
storage/    bytes on disk: digests, private files, objects, SQLite

`console` is what both command lines print with; `version` has the number of the protocol.
"""
