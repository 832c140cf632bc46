"""Transports: what carries the topics.

To add one: a class that passes `rftstream.testing.conformance`, and a line in `TRANSPORTS`.
"""

TRANSPORTS = {
    "embedded": "rftstream.transport.embedded.transport:EmbeddedTransport",
    "kafka": "rftstream.transport.kafka.transport:KafkaTransport",
    "memory": "rftstream.transport.memory.transport:MemoryTransport",
}
