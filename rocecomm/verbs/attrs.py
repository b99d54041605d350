"""Plain records that the query verbs return; they can be pickled and compared."""

import ipaddress
from typing import NamedTuple

from rocecomm.enums import (
    MTU,
    AtomicCap,
    DeviceCap,
    EventType,
    GIDType,
    LinkLayer,
    PortState,
    QPState,
    QPType,
)

__all__ = ["DeviceAttr", "PortAttr", "GIDEntry", "AHAttr", "QPAttr", "SRQAttr", "AsyncEvent"]


class DeviceAttr(NamedTuple):
    """What a device is and can do (``ibv_query_device``). GUIDs are text, sizes bytes."""

    fw_ver: str
    node_guid: str
    sys_image_guid: str
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: DeviceCap
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_res_rd_atom: int
    max_qp_init_rd_atom: int
    atomic_cap: AtomicCap
    max_mw: int
    max_mcast_grp: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int


class PortAttr(NamedTuple):
    """State and limits of a port (``ibv_query_port``)."""

    state: PortState
    max_mtu: MTU
    active_mtu: MTU
    gid_tbl_len: int
    port_cap_flags: int
    max_msg_sz: int
    bad_pkey_cntr: int
    qkey_viol_cntr: int
    pkey_tbl_len: int
    lid: int
    sm_lid: int
    lmc: int
    max_vl_num: int
    sm_sl: int
    subnet_timeout: int
    active_width: int
    active_speed: int
    phys_state: int
    link_layer: LinkLayer
    flags: int


class GIDEntry(NamedTuple):
    """One entry of a port's GID table. ``gid`` is 16 bytes in network order."""

    index: int
    port_num: int
    gid: bytes
    gid_type: GIDType
    ndev_ifindex: int

    @property
    def address(self) -> ipaddress.IPv6Address:
        """The GID as an IPv6 address; ``.address.ipv4_mapped`` is its IPv4 address or None."""
        return ipaddress.IPv6Address(self.gid)

    def __str__(self) -> str:
        return f"{self.address} ({self.gid_type.name})"


class AHAttr(NamedTuple):
    """Path to a peer (``struct ibv_ah_attr``). ``dgid`` of 16 bytes makes it global (RoCE)."""

    dgid: bytes | None = None
    sgid_index: int = 0
    port_num: int = 1
    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    traffic_class: int = 0
    hop_limit: int = 64
    flow_label: int = 0


class QPAttr(NamedTuple):
    """Attributes of a queue pair (``ibv_query_qp``)."""

    qp_state: QPState
    cur_qp_state: QPState
    qp_type: QPType
    path_mtu: int
    path_mig_state: int
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: int
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int
    ah_attr: AHAttr
    pkey_index: int
    sq_draining: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    sq_sig_all: bool


class SRQAttr(NamedTuple):
    """Attributes of a shared receive queue (``ibv_query_srq``)."""

    max_wr: int
    max_sge: int
    srq_limit: int


class AsyncEvent(NamedTuple):
    """An asynchronous event, already acknowledged.

    ``element`` is the CQ, QP or SRQ that it concerns (None if that object is gone), or the
    port number for port events; None for events of the whole device.
    """

    event_type: EventType
    element: object
