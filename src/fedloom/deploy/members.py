"""Later changes to a federation: another node, a new key of a node, a new certificate of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.core import disk
from fedloom.core.errors import CheckpointError, ConfigError, DataError, Fault
from fedloom.deploy import flower, keys
from fedloom.deploy.contract import read_contract, read_outline, without_folder, write_contract
from fedloom.deploy.node import Policy
from fedloom.deploy.serve import is_done, last_run, register, revoke, revoked_key
from fedloom.deploy.site import (
    AUTHORITY,
    CONTRACT,
    SERVER,
    NodeIdentity,
    NodeSettings,
    folder_name,
    is_conducted,
    read_listens,
    read_rules,
    slugs_of,
    with_clients,
    write_bundle,
)
from fedloom.deploy.waits import writing


def add_node(site: Path, name: str) -> str:
    """Add a node between two runs; the name of its folder. The others need the new contract."""
    home = site / SERVER
    contract = read_contract(home)
    *_, slug = slugs_of([*contract.nodes, name])
    last = last_run(home)
    if is_conducted(home) or (last and not is_done(home, last)):
        what = f"run {last} has not ended, and a run keeps its initial nodes"
        raise CheckpointError(f"{home}: {what}; continue with: fedloom deploy resume {site}")
    authority, certificate = _authority(site)
    partition = with_clients(contract.config, len(contract.nodes) + 1)
    grown = contract._replace(config=contract.config._replace(partition=partition), nodes=(*contract.nodes, name))
    listens, rules = read_listens(home), read_rules(home)
    pair, seal = keys.new_node(), keys.new_seal(name, authority, certificate)
    identity = NodeIdentity(name=name, server=f"{listens.host}:{listens.port}")
    settings = NodeSettings(identity, Policy(require_secure_sum=rules.secure_sum))
    disk.make_folder(site / slug)
    files = keys.node_files(pair, seal) | {"ca.crt": (home / "ca.crt").read_bytes()}
    theirs = grown._replace(config=without_folder(grown.config))
    write_bundle(site / slug, theirs, settings, files)
    disk.make_folder(site / CONTRACT)
    bundles = [site / folder_name(old) for old in contract.nodes]
    for folder in (site / CONTRACT, *(bundle for bundle in bundles if bundle.is_dir())):
        write_contract(folder, theirs)
    write_contract(home, grown)
    disk.write_bytes(home / f"{slug}.pub", pair.public)
    return slug


def renew_server(site: Path) -> None:
    """Give the server a new key and a new certificate; it uses them when it is started again."""
    home = site / SERVER
    read_outline(home)
    authority, certificate = _authority(site)
    hosts = dict.fromkeys([read_listens(home).host, "localhost", "127.0.0.1"])
    pair = keys.new_server(list(hosts), authority, certificate)
    with writing(home, "try again"):
        disk.write_bytes(home / "server.key", pair.private)
        disk.write_bytes(home / "server.pem", pair.public)


def renew_node(site: Path, name: str) -> str:
    """Give a node new keys, and revoke the old ones; the name of the folder with the new ones."""
    home = site / SERVER
    outline = read_outline(home)
    if name not in outline.nodes:
        raise ConfigError([Fault("NAME", f"no node is called '{name}'", f"nodes: {', '.join(outline.nodes)}")])
    authority, certificate = _authority(site)
    flower.call(home, "supernode", "list")  # an error if the server does not run: it has to register the new key
    slug = folder_name(name)
    if not revoked_key(home, name):
        revoke(site, name)
    pair, seal = keys.new_node(), keys.new_seal(name, authority, certificate)
    with writing(home, "try again"):
        disk.make_folder(site / slug)
        for file, data in keys.node_files(pair, seal).items():
            disk.write_bytes(site / slug / file, data)
        disk.write_bytes(home / f"{slug}.pub", pair.public)
        register(home, outline.nodes)
    return slug


def _authority(site: Path) -> tuple[Any, Any]:
    """The key and the certificate of the authority."""
    path = site / AUTHORITY / "ca.key"
    try:
        return keys.read_authority(path.read_bytes(), (site / SERVER / "ca.crt").read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename}: is missing, but is needed to sign certificates; restore it for this"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: is not the key of this federation's authority ({error})") from error
