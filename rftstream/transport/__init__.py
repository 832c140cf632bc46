"""Transports: the systems that carry the topics.

To add one, write a class that passes `rftstream.testing.conformance`, and add a line to `TRANSPORTS`."""

from rftstream.config.parts.part_specs import TransportSpec

TRANSPORTS = {
    "embedded": TransportSpec(
        "rftstream.transport.embedded.transport:EmbeddedTransport", in_run_folder=True, takes_create=True
    ),
    "kafka": TransportSpec("rftstream.transport.kafka.transport:KafkaTransport", takes_create=True),
    "memory": TransportSpec("rftstream.transport.memory.transport:MemoryTransport", is_shared=False),
}
