"""Which IP addresses belong to this machine, to our own network, or to no host."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_CREDENTIALS = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_private(address: Address) -> bool:
    """Whether fetching from an address is forbidden. An IPv6 address that embeds an IPv4 one is judged by that."""
    if isinstance(address, ipaddress.IPv6Address) and (inner := _inside(address)):
        return any(is_private(one) for one in inner)
    is_site = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return not address.is_global or address.is_multicast or address.is_reserved or is_site


def is_special(address: Address) -> bool:
    """Whether fetching from an address is forbidden even if private networks are allowed.

    Clouds serve the credentials of their machines at some of these addresses. The others belong to no single machine.
    """
    if isinstance(address, ipaddress.IPv6Address) and (inner := _inside(address)):
        return any(is_special(one) for one in inner)
    return address.is_link_local or address.is_multicast or address.is_unspecified or address in _CREDENTIALS


async def resolve(host: str) -> list[Address]:
    """All addresses of a name; raises OSError if it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def _inside(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that a packet for this address may finally reach: mapped, 6to4, Teredo, NAT64."""
    if address.teredo is not None:
        return list(address.teredo)
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address in _NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return [] if inner is None else [inner]
