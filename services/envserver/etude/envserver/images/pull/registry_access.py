"""Access to registries: credentials and mirrors, in the forms that skopeo reads."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAccess:
    """Access of one pool or user to registries."""

    credentials: Path | None = None
    """File in the format of Docker's config.json; None: no registry asks for any."""
    mirrors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By host, or host and path: what is tried first, in order. Digests tell if a mirror lies."""
    insecure: frozenset[str] = frozenset()
    """Hosts that are spoken to without TLS."""

    def skopeo_options(self, flag: str) -> list[str]:
        """The option that names the credentials, if there are any."""
        return [] if self.credentials is None else [flag, str(self.credentials.resolve())]

    def _write_registries(self, path: Path) -> None:
        """Write the file that containers-registries.conf(5) describes, version 2."""
        # Texts of JSON are texts of TOML.
        lines = list[str]()
        for host in sorted({*self.mirrors, *self.insecure}):
            lines += ["[[registry]]", f"location = {json.dumps(host)}"]
            lines += ["insecure = true"] if host in self.insecure else []
            for mirror in self.mirrors.get(host, ()):
                is_insecure = mirror.partition("/")[0] in self.insecure
                lines += ["[[registry.mirror]]", f"location = {json.dumps(mirror)}"]
                lines += ["insecure = true"] if is_insecure else []
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def program_environment(self, scratch: Path) -> Mapping[str, str]:
        """Environment of skopeo and buildah, without this user's own credentials and mirrors."""
        settings = scratch / ".config/containers/registries.conf"
        settings.parent.mkdir(parents=True, exist_ok=True)
        self._write_registries(settings)
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(scratch),
            "CONTAINERS_REGISTRIES_CONF": str(settings),
            **{name: os.environ[name] for name in _PROXIES if name in os.environ},
        }


NO_ACCESS = RegistryAccess()
