"""The gRPC surface: an interceptor, authorization, one file per service, and messages to a lead."""
