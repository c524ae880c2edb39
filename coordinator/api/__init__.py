"""The gRPC interface: an interceptor, authorization, one file per service, and messages to a lead."""
