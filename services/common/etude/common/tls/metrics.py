"""Metrics of certificates in every part."""

from prometheus_client import Counter, Gauge

EXPIRY = Gauge(
    "etude_tls_certificate_expiry_timestamp_seconds",
    "When the certificate in use ends, in Unix time; no series without TLS.",
    ["identity"],
)
BEGIN = Gauge(
    "etude_tls_certificate_begin_timestamp_seconds",
    "When the certificate in use began, in Unix time; no series without TLS.",
    ["identity"],
)
LOADED = Counter("etude_tls_certificates_loaded", "Certificates taken into use.")
UNREADABLE = Counter(
    "etude_tls_certificates_unreadable", "Files of a certificate that could not be taken into use."
)
REFUSED = Counter(
    "etude_tls_refused",
    "Calls refused for the caller's certificate, and handshakes that a peer's certificate ended.",
    ["side"],
)
