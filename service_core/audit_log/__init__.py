"""The audit log of a service: lines, the chain through them, signed heads, and the commands that read it.

`HOME/audit/000001.jsonl`, ... the lines; `anchor.json` the newest line that is on the disk for certain; `heads.json`
the newest head of each other side; `lock` held by who writes. Nothing is ever deleted here.
"""
