"""The gRPC surface.

Every call passes the interceptor, which turns errors into status codes, and asks who may call. One file per service:
control (sessions), transfer (files), lead (runs), enrolment (certificates). What a lead is shown, by `watch` as well,
is made in `messages`; how large an update may be, in `upload_limits`.
"""
