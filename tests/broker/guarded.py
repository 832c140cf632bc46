"""A broker that allows nothing without an ACL, but for those who come in the open, as its owner. The users of runs have
passwords (SCRAM) or certificates; one more has a password of the mechanism PLAIN."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from rftstream.config.log_users import ADMIN
from rftstream.config.sections import TransportSection
from rftstream.runs.access import user_kinds
from rftstream.transport.kafka.client.compat import StableAdminClient
from rftstream.transport.kafka.connection import KafkaClientFactory
from tests.broker.starting import start_broker, warm_up
from tests.e2e.workplace import FAKE

TEAMS = ("a-", "b-")
"""How the names of the users of two runs begin."""

PASSWORD = "the-password-of-"
"""And the name of the user."""

DESCRIPTION = "guarded.json"

OF_TESTS = "test-"
"""How the names of runs begin with which the user of the mechanism PLAIN may do everything."""


@dataclass(frozen=True)
class Guarded:
    """Where the broker listens, and who may come how."""

    open: str
    """For who may do all: the owner of the broker."""
    passwords: str
    certificates: str
    folder: Path
    ca: str
    """Who signed the broker's certificate."""
    secure: Mapping[str, str]
    """As `scripts/kafka` describes the ways to the broker."""

    def save(self) -> None:
        """Write it into its folder, for other processes."""
        (self.folder / DESCRIPTION).write_text(json.dumps({**asdict(self), "folder": str(self.folder)}))

    @classmethod
    def load(cls, folder: Path) -> Guarded:
        """Return what was saved there."""
        return cls(**{**json.loads((folder / DESCRIPTION).read_text()), "folder": folder})

    def options(self, team: str) -> str:
        """The part of a run file that is the same for all users of a run."""
        return (
            f'security_protocol = "SASL_PLAINTEXT"\nsasl_mechanism = "SCRAM-SHA-512"\n'
            f'sasl_plain_username = "{team}{{role}}"\nsasl_plain_password = "env:KAFKA_PASSWORD_{{role}}"\n'
        )

    def by_certificate(self) -> str:
        """As `options`, for users who are known by their certificates."""
        own = self.folder / "clients"
        return (
            f'security_protocol = "SSL"\nssl_cafile = "{self.ca}"\nssl_certfile = "{own}/{{role}}.pem"\n'
            f'ssl_keyfile = "{own}/{{role}}.key"\n'
        )

    def run_file(self, name: str, options: str) -> str:
        text = FAKE.replace('name = "tiny"', f'name = "{name}"')
        servers = self.certificates if '"SSL"' in options else self.passwords
        kafka = f'[transport]\nkind = "kafka"\nservers = "{servers}"'
        return text.replace("[transport]", kafka) + f"[transport.options]\n{options}"

    def passwords_of(self, team: str, *kinds: str) -> dict[str, str]:
        """The environment in which these users are known."""
        return {f"KAFKA_PASSWORD_{kind}": f"{PASSWORD}{team}{kind}" for kind in kinds}

    def clients(self, user: str, run_id: str) -> KafkaClientFactory:
        """Clients of a user with a password."""
        options = {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_plain_username": user,
            "sasl_plain_password": PASSWORD + user,
        }
        return KafkaClientFactory(run_id, TransportSection(kind="kafka", servers=self.passwords, options=options))

    @contextmanager
    def admin(self, user: str, run_id: str) -> Iterator[KafkaAdminClient]:
        with closing(self.clients(user, run_id).admin(StableAdminClient)) as client:
            yield client


def start_guarded(folder: Path, owner: int, *, nodes: int = 1) -> Guarded:
    """Start a broker, which ends when the process `owner` does."""
    certify(folder / "clients", *user_kinds(), ADMIN)
    settings = (
        "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        f"super.users=User:ANONYMOUS;User:CN={ADMIN};{';'.join(f'User:{team}{ADMIN}' for team in TEAMS)}",
        "allow.everyone.if.no.acl.found=false",
    )
    ca = folder / "clients" / "ca.pem"
    address = start_broker(
        folder / "kafka", owner, "--secure", f"--client-ca={ca}", f"--nodes={nodes}",
        *(f"--set={one}" for one in settings),
    )  # fmt: skip
    warm_up(address)
    secure = json.loads((folder / "kafka" / "secure.json").read_text())
    guarded = Guarded(
        open=address,
        passwords=secure["SASL_PLAINTEXT"],
        certificates=secure["SSL"],
        folder=folder,
        ca=secure["ssl_cafile"],
        secure={**secure, "PLAINTEXT": address},
    )
    _make_users(guarded, [f"{team}{kind}" for team in TEAMS for kind in (*user_kinds(), ADMIN, "nobody")])
    for kind in (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID):
        allow(guarded, kind, OF_TESTS, ACLOperation.ALL)
    return guarded


def allow(guarded: Guarded, kind: ResourceType, prefix: str, *operations: ACLOperation) -> None:
    """Let the user of the mechanism PLAIN do this with what has such a name."""
    pattern = ResourcePattern(kind, prefix, ACLResourcePatternType.PREFIXED)
    with closing(KafkaAdminClient(bootstrap_servers=guarded.open)) as client:
        client.create_acls([ACL("User:user", "*", one, ACLPermissionType.ALLOW, pattern) for one in operations])


def _make_users(guarded: Guarded, users: list[str]) -> None:
    wanted = [
        UserScramCredentialUpsertion(user, ScramMechanism.SCRAM_SHA_512, PASSWORD + user, iterations=4096)
        for user in users
    ]
    with closing(KafkaAdminClient(bootstrap_servers=guarded.open)) as client:
        said = client.alter_user_scram_credentials(wanted)
    assert not any(said.values()), said


def certify(folder: Path, *names: str) -> None:
    """A certificate and its key, NAME.pem, for each; all signed by ca.pem."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650"]

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True)

    openssl("req", "-x509", *key, "-subj", "/CN=clients", "-keyout", "ca.key", "-out", "ca.pem")
    for name in names:
        openssl("req", *key[:-2], "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "3650", "-out", f"{name}.pem")  # fmt: skip
