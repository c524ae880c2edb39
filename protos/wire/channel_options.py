"""How both services set up gRPC: the size of messages, what a stream may send ahead, and when a peer counts as dead."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 << 20
"""Both sides refuse larger messages: a bound against denial of service, far above a chunk."""
MAX_ANSWER_BYTES = 64 << 20
"""A lead takes larger answers: what a service knows of a thousand silos, or of a run of a thousand rounds."""
WINDOWS = 1 << 20, 32 << 20
"""What a stream may be ahead of its reader, in bytes: at least, and at most (1 Gbit/s over a round trip of 250 ms)."""
_LINE_BYTES_PER_S = 125_000_000
_MESSAGES: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_permit_without_calls", 1),
    # Fixed: gRPC's own estimate of the line has no bound, and how many windows there are is bounded by the services.
    ("grpc.http2.bdp_probe", 0),
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_MESSAGES,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # Whoever shows no certificate in time is disconnected; so is who holds a connection without a call.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_concurrent_streams", 100),
    # A busy service answers late. gRPC would cancel what waited for 30 s, and give the caller no reason.
    ("grpc.server_max_unrequested_time_in_server", 300),
)
_OF_CLIENTS: tuple[tuple[str, int], ...] = (
    *_MESSAGES,
    ("grpc.http2.lookahead_bytes", WINDOWS[1]),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A renewed certificate must not travel over a connection that was made with the old one.
    ("grpc.use_local_subchannel_pool", 1),
    # Our own back-off decides when to try; gRPC's would only add to it.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
CLIENT_OPTIONS = (*_OF_CLIENTS, ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))
LEAD_OPTIONS = (*_OF_CLIENTS, ("grpc.max_receive_message_length", MAX_ANSWER_BYTES))


def window_bytes(round_trip_ms: float) -> int:
    """Return what a stream must be ahead of its reader for 1 Gbit/s over a round trip, within `WINDOWS`."""
    least, most = WINDOWS
    return int(min(max(least, _LINE_BYTES_PER_S * round_trip_ms / 1e3), most))


def server_options(window: int) -> tuple[tuple[str, int], ...]:
    """Return the options of a service whose callers may be so many bytes ahead in each stream."""
    return (*SERVER_OPTIONS, ("grpc.http2.lookahead_bytes", window))
