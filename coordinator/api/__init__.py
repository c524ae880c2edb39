"""The gRPC surface.

Every call passes the interceptor, which turns errors into status codes, and asks who may call. One file per service:
control (sessions), transfer (files), lead (runs), enrolment (certificates).
"""
