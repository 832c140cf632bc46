"""Transports: what carries the topics.

To add one: a class that passes `rftstream.testing.conformance`, and a line in `TRANSPORTS`.
"""

from rftstream.config.parts.part_specs import TransportSpec

TRANSPORTS = {
    "embedded": TransportSpec(
        "rftstream.transport.embedded.transport:EmbeddedTransport", in_run_folder=True, takes_create=True
    ),
    "kafka": TransportSpec("rftstream.transport.kafka.transport:KafkaTransport", takes_create=True),
    "memory": TransportSpec("rftstream.transport.memory.transport:MemoryTransport", is_shared=False),
}
