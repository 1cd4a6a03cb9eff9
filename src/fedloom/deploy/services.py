"""Files for administrators: systemd units, a Compose file and a reverse proxy, as templates to be adapted."""

from __future__ import annotations

from pathlib import Path

_UNIT = """[Unit]
Description=fedloom {what}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
User=fedloom
UMask=0077
WorkingDirectory={folder}
ExecStart=fedloom {command}
Restart=always
RestartSec=10
KillSignal=SIGTERM
TimeoutStopSec=60
NoNewPrivileges=true
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""

_COMPOSE = """# An image with `pip install 'fedloom[deploy]'` is yours to build; here it is called fedloom.
# Mount the experiment's data as well, at the path that experiment.toml names.
services:
  server:
    image: fedloom
    command: ["fedloom", "deploy", "server", "/srv/site"]
    ports: ["{port}:{port}"]
    volumes: ["./:/srv/site/server"]
    restart: always
"""

_PROXY = """# In front of fedloom's own gate: nodes reach the Fleet API, and nothing else of the SuperLink.
# Set proxied = {inner} in [server] of server.toml, so that the gate leaves port {port} to nginx.
server {{
    listen {port} ssl;
    server_name {host};
    ssl_certificate     {home}/server.pem;
    ssl_certificate_key {home}/server.key;
    client_max_body_size 64m;
    location /v1/fleet/ {{
        proxy_pass https://127.0.0.1:{inner};
        proxy_ssl_trusted_certificate {home}/ca.crt;
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_read_timeout 600s;
    }}
    location / {{ return 403; }}
}}
"""


def server_files(home: Path, host: str, port: int) -> dict[str, bytes]:
    """The files for a server's services, by name."""
    unit = _UNIT.format(what="server", folder=home.parent, command=f"deploy server {home.parent}")
    inner = port + 1 if port < 65535 else port - 1
    return {
        "fedloom-server.service": unit.encode(),
        "compose.yaml": _COMPOSE.format(port=port).encode(),
        "nginx.conf": _PROXY.format(port=port, inner=inner, host=host, home=home).encode(),
    }


def unit_of_node(slug: str) -> bytes:
    """The systemd unit of a node whose folder is in /srv."""
    return _UNIT.format(what=f"node {slug}", folder=f"/srv/{slug}", command=f"deploy node /srv/{slug}").encode()


def unit_of_peer(slug: str) -> bytes:
    """The systemd unit of a node of a network without a server; once its rounds are done, it is not started again."""
    unit = _UNIT.format(what=f"peer {slug}", folder=f"/srv/{slug}", command=f"peers start /srv/{slug}")
    return unit.replace("Restart=always", "Restart=on-failure").encode()
