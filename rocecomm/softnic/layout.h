/* The shared memory of the fabric: every byte that two processes both look at.
 *
 * One directory per user holds a small file "fabric" (slot generations, and one byte-range
 * lock per slot that says who lives) and one sparse file "seg-SLOT" per opened device context.
 * A segment begins with struct sn_seg; fixed tables of QPs, CQs, SRQs and MRs follow, then a heap
 * of pages for the rings. Tables and heap get memory (fallocate) before they are first touched.
 *
 * Words: a *slot* is the place of one context, its *id* is slot and generation, never used again
 * soon. R is the requester of a work request, T its responder (target). The *executor* is the
 * process that carries a request out: R's, or T's when R is asleep.
 */
#ifndef SN_LAYOUT_H
#define SN_LAYOUT_H

#include <stdatomic.h>
#include <stdint.h>

#define SN_MAGIC 0x30636e74666f73ULL /* "softnc0" */
#define SN_LAYOUT_VERSION 2u

#define SN_SLOT_BITS 12
#define SN_SLOTS (1u << SN_SLOT_BITS)
#define SN_QPS 4096u /* per slot; QP number = slot << 12 | index */
#define SN_CQS 4096u
#define SN_SRQS 1024u
#define SN_MRS 65536u /* key = index << 16 | tag */
#define SN_POOLS 256u
#define SN_CLAIMS 64u
#define SN_CLAIM_KEYS 4u
#define SN_MAX_SGE 32u
#define SN_SMALL 240u /* payloads up to this travel in slots beside the work request */
#define SN_LAZY 64u   /* receives of one QP whose payload waits in its slot for the poll */
#define SN_SEG_SIZE (1ULL << 30)
#define SN_MAX_CQE 65536
#define SN_MAX_WR 16384u
#define SN_MAX_INLINE 1024u
#define SN_MAX_RD_ATOM 16
#define SN_MEMBERS 64		 /* of multicast groups, in one context */
#define SN_MAX_DM (1ULL << 20) /* device memory of one context */
#define SN_BIG (1u << 20)    /* transfers from here on are cut into chunks */
#define SN_CHUNK (256u << 10)
#define SN_RUN 8 /* chunks that one end takes at once, at most */
#define SN_CALLS 16
#define SN_GIDS 3 /* entries in use; the table has room for more */
#define SN_GID_TABLE 16

#define SN_ALIGNED _Alignas(64)

typedef uint32_t sn_id; /* generation << SN_SLOT_BITS | slot; 0 is nobody */

struct sn_lock {
	_Atomic sn_id owner;
};

struct sn_fabric {
	uint64_t magic;
	uint32_t version;
	_Atomic uint32_t next_slot;
	_Atomic uint32_t generation[SN_SLOTS];
	_Atomic uint32_t faults; /* contexts that have any injected */
};

struct sn_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

/* ---- receive side ------------------------------------------------------------------------ */

enum sn_rwqe_state { SN_RWQE_FREE, SN_RWQE_POSTED, SN_RWQE_TAKEN, SN_RWQE_LAZY, SN_RWQE_PLACED };

/* T has polled its completion, though a stopped sender still has it in its hands. */
#define SN_RWQE_REPORTED 0x80000000u

/* What T writes when it posts, and R only reads. */
struct sn_rwqe {
	_Atomic uint64_t wr_id;
	_Atomic uint32_t serial; /* of the posting: a completion of an earlier one is a duplicate */
	uint32_t num_sge;
	struct sn_sge sge[]; /* max_sge of the queue */
};

/* What R writes when it takes the entry, on cache lines of its own. */
struct sn_rslot {
	_Atomic uint32_t state;
	_Atomic uint32_t qp;   /* index of the QP that it belongs to; of an SRQ, once it is taken */
	uint32_t lazy_len;     /* bytes that wait in `small` */
	_Atomic sn_id mover;   /* who copies `small` into place: a lock */
	uint8_t small[SN_SMALL];
};

/* A receive queue: of one QP, or shared (SRQ).
 *
 * Entries of an RC or UC queue are used and given back in turn. One executor takes them, whoever holds
 * R's exec lock, and the owner posts them, neither with a lock: an entry belongs to who moves its state
 * from POSTED to TAKEN. Queues of several takers (UD, SRQ) have a ring of indices and are locked. */
struct sn_rq {
	uint32_t size; /* a power of two */
	uint32_t max_sge;
	uint32_t stride;
	uint32_t slot; /* offset of struct sn_rslot in an entry */
	uint32_t ordered;
	uint64_t wqes; /* offset in the segment */
	uint64_t ring; /* offset of uint32_t[size]: indices of posted entries */
	SN_ALIGNED struct sn_lock lock; /* of an ordered queue: who flushes */
	_Atomic uint32_t head;
	uint32_t tail_seen; /* the executor's: tail when it last looked */
	SN_ALIGNED _Atomic uint32_t tail;
	_Atomic uint32_t waiting; /* senders that found it empty */
};

struct sn_srq {
	struct sn_rq rq;
	uint32_t pd;
	_Atomic uint32_t limit;
	_Atomic uint32_t epoch;
	_Atomic uint64_t waiters[SN_QPS / 64]; /* T's QPs whose peer waits for a receive */
};

/* ---- send side --------------------------------------------------------------------------- */

struct sn_swqe {
	uint64_t wr_id;
	uint32_t opcode; /* enum ibv_wr_opcode */
	uint32_t flags;	 /* enum ibv_send_flags */
	uint32_t imm;
	uint32_t num_sge;
	uint64_t remote_addr;
	uint64_t compare_add, swap;
	uint32_t rkey;
	uint32_t length;
	uint32_t staged; /* the payload lies in the data area (inline, or parked and small) */
	uint32_t ud_qpn, ud_qkey;
	uint32_t data; /* offset of the data area from the start of the entry */
	struct sn_sge sge[];
};

/* A big transfer, which both ends may copy: see help.c. */
struct sn_help {
	_Atomic uint64_t ticket; /* serial << 32 | next chunk; 0: nothing to take */
	_Atomic uint32_t done;
	_Atomic uint32_t failed;
	uint32_t serial;
	_Atomic uint32_t chunks;
	_Atomic uint32_t item; /* of a send: the receive that it goes to */
	_Atomic uint64_t length;
};

/* OWNER: the entry is the owner\'s alone to execute */
enum sn_wait { SN_WAIT_NOTHING, SN_WAIT_PEER, SN_WAIT_RNR, SN_WAIT_FAULT, SN_WAIT_OWNER };

struct sn_sq {
	uint32_t size; /* a power of two */
	uint32_t max_sge;
	uint32_t max_inline;
	uint32_t stride;
	uint64_t wqes; /* offset in the segment */
	SN_ALIGNED _Atomic uint32_t tail; /* posted, written by the owner */
	SN_ALIGNED struct sn_lock exec;	  /* whoever executes holds it */
	_Atomic uint32_t head;		  /* next to execute */
	_Atomic uint32_t reported;	  /* how many completions there were */
	_Atomic uint32_t completing;	  /* position + 1 of the entry whose completion is being pushed */
	_Atomic uint32_t wait;		  /* enum sn_wait: why the head waits */
	uint32_t staged_to;	  /* the owner's: entries before this position were looked at by stage() */
	uint32_t polled;	  /* the owner's: completions before this position are duplicates */
	uint32_t peer_epoch;	  /* T's epoch + 1 since the first message, 0 before */
	uint32_t last_key;	  /* of T's memory that the last send went to: likely the next one's, too */
	_Atomic uint64_t deadline; /* CLOCK_MONOTONIC ns when the wait turns into an error; 0: never */
	SN_ALIGNED struct sn_help help;
};

#define SN_QP_FREE 0xffu

struct sn_qp {
	_Atomic uint32_t state; /* enum ibv_qp_state or SN_QP_FREE */
	_Atomic uint32_t epoch; /* changes at every RESET and destroy; older completions are void */
	uint32_t qpn; /* of this place in the table, once and for all */
	_Atomic uint32_t type;
	uint32_t pd;
	_Atomic uint32_t access;
	uint32_t send_cq, recv_cq;
	_Atomic int32_t srq;
	_Atomic uint32_t dest_qpn; /* the other end looks at what modify_qp may be changing */
	_Atomic uint32_t qkey;
	_Atomic uint8_t min_rnr_timer;
	uint8_t timeout, retry_cnt, rnr_retry;
	uint8_t max_rd_atomic, max_dest_rd_atomic, sq_sig_all, path_mtu;
	_Atomic uint32_t comm_est; /* a message has come in RTR, and its owner was told */
	SN_ALIGNED struct sn_sq sq;
	SN_ALIGNED struct sn_rq rq;
	/* Receives of this QP whose payload still waits in the entry's slot: a later write, read
	 * or atomic puts them in place first. Produced under R's exec lock, consumed by T's poll. */
	SN_ALIGNED _Atomic uint32_t lazy_polled;
	SN_ALIGNED _Atomic uint32_t lazy_made;
	uint32_t lazy_seen; /* the executor's: lazy_polled when it last looked */
	uint32_t lazy[SN_LAZY];
};

/* ---- completions ------------------------------------------------------------------------- */

#define SN_CQE_LAZY 1u
#define SN_CQE_RECV 2u

struct sn_cqe {
	uint64_t wr_id;
	uint32_t qpn;
	uint32_t epoch;
	uint32_t byte_len;
	uint32_t imm;
	uint32_t src_qp;
	uint16_t wc_flags;
	uint8_t status;
	uint8_t opcode;
	uint32_t entry; /* receive: the entry that it gives back; send: position in the queue */
	uint16_t kind; /* SN_CQE_* */
	uint16_t vendor_err;
	int32_t srq; /* the entry is one of this SRQ's, -1: of the QP's own queue */
	uint32_t srq_epoch;
	uint64_t stamp; /* CLOCK_MONOTONIC ns, where the queue asks for it */
	uint32_t serial; /* receive: of the posting */
	_Atomic uint32_t seq; /* position + 1, written last */
};

#define SN_CQ_STAMPED 1u /* completions carry the time */
#define SN_CQ_LOSSY 2u	 /* an overrun is no error, the completion is lost */

enum sn_arm { SN_ARM_NONE, SN_ARM_NEXT, SN_ARM_SOLICITED };

struct sn_cq {
	struct sn_lock lock; /* producers */
	uint32_t size;
	uint64_t ring;
	_Atomic uint32_t tail;
	uint32_t head_seen; /* the producers': head when they last looked */
	uint32_t epoch;
	uint32_t channel; /* number of the completion channel's FIFO, 0: none */
	uint32_t kind;	  /* SN_CQ_* */
	SN_ALIGNED _Atomic uint32_t head;  /* consumer */
	SN_ALIGNED _Atomic uint32_t armed; /* enum sn_arm; looked at with every entry, seldom changed */
	_Atomic uint32_t overrun;
};

/* What travels through the FIFO of a channel: small enough to be written in one piece. */
struct sn_event {
	uint16_t kind; /* 0 completion, else enum ibv_event_type + 1 */
	uint16_t index;
	uint32_t epoch;
};

/* ---- memory ------------------------------------------------------------------------------ */

struct sn_mr {
	_Atomic uint32_t key; /* 0: nothing here, or no longer */
	uint32_t access;
	uint32_t pd;
	uint32_t pool; /* index + 1 when peers can map the memory, else 0 */
	uint64_t iova, length;
	uint64_t host; /* address in the owner */
	uint64_t pool_offset;
	uint32_t pool_serial;
	uint32_t taken, tag; /* the owner's: is the entry in use, and the last tag it had */
	uint32_t window;     /* 0: a region; else enum ibv_mw_type, and bound while the key is set */
	uint32_t parent;     /* of a window: the region's key */
	uint32_t qpn;	     /* of a type 2 window: it is good for this queue pair only */
};

/* Memory that peers can map, through /proc/PID/fd: of softnic_alloc, or a file that the program mapped. */
struct sn_pool {
	_Atomic uint32_t serial; /* 0: free */
	int32_t fd;
	uint64_t offset, length; /* in the file */
	uint32_t from_use;	 /* how many uses before it pays for a peer to map it */
};

/* What this context's process touches right now in two contexts' memory: published before the
 * keys are looked at, so that dereg, RESET and destroy know whom to wait for. */
struct sn_claim {
	SN_ALIGNED _Atomic uint32_t active;
	_Atomic uint32_t serial;
	_Atomic sn_id id[2]; /* R and T */
	_Atomic uint32_t qpn[2];
	_Atomic uint32_t num_keys[2]; /* more than SN_CLAIM_KEYS: any key */
	_Atomic uint32_t key[2][SN_CLAIM_KEYS];
};

/* Faults on request. Any of them: only the owner carries out this context's send queues. */
#define SN_FAULTS_RULES 1u
#define SN_FAULTS_PORT 2u /* the port is down */
#define SN_FAULTS_SHUN 4u /* somebody is dead for this context */

/* Memory through which bytes travel where the system refuses process_vm: see staging.c. A slot is
 * one executor's at a time; it has two halves, each with a chunk of memory behind it. */
#define SN_STAGE_SLOTS 4u
#define SN_STAGE_CHUNK (128u << 10)
#define SN_STAGE_CHUNK_LEAST (8u << 10)
#define SN_STAGE_PIECES (SN_MAX_SGE + 1)

enum sn_stage_state { SN_STAGE_FREE, SN_STAGE_ASKED, SN_STAGE_BUSY, SN_STAGE_DONE, SN_STAGE_FAULT };
enum sn_stage_kind { SN_STAGE_STORE, SN_STAGE_FETCH, SN_STAGE_ADD, SN_STAGE_SWAP };

struct sn_stage_half {
	SN_ALIGNED _Atomic uint32_t state; /* a futex */
	_Atomic uint32_t watched;	   /* the executor sleeps on it */
	uint32_t kind, num;
	uint64_t compare_add, swap, old;
	struct { uint64_t addr, len; } piece[SN_STAGE_PIECES]; /* in the owner's memory */
};

struct sn_stage_slot {
	SN_ALIGNED struct sn_lock lock;
	struct sn_stage_half half[2];
};

struct sn_staging {
	_Atomic uint32_t bell; /* a futex, rung with every request */
	_Atomic uint32_t asleep;
	uint32_t chunk;
	struct sn_stage_slot slot[SN_STAGE_SLOTS];
};

/* A datagram queue pair in a multicast group. */
struct sn_member {
	_Atomic uint32_t qpn; /* 0: nobody */
	uint8_t gid[16];
};

struct sn_seg {
	uint64_t magic;
	uint32_t version;
	sn_id id;
	int32_t pid;
	uint32_t uid;
	uint64_t instance;
	uint64_t probe_addr; /* of a private word that holds `instance`: may peers read our memory? */
	/* entries of each table that have memory behind them */
	_Atomic uint32_t qp_limit, cq_limit, srq_limit, mr_limit;
	uint32_t refused; /* the system refuses process_vm to this process altogether */
	_Atomic uint32_t staging_wanted; /* 1: a peer that cannot reach us asks for staging; 2: seen */
	_Atomic uint64_t staging;	 /* offset of struct sn_staging, 0: none */
	struct sn_lock atomics; /* read-modify-writes on this context's memory */
	_Atomic uint32_t faults;      /* SN_FAULTS_*: what is injected here */
	_Atomic uint64_t port_up_at;  /* CLOCK_MONOTONIC ns when a port that is down comes up; 0: when told */
	_Atomic uint32_t claim_limit; /* no claim at or above this index was ever made */
	/* QP numbers of ours whose other end asks for help with a big transfer, and which are set */
	SN_ALIGNED _Atomic uint32_t calls;
	_Atomic uint32_t call[SN_CALLS];
	SN_ALIGNED _Atomic uint64_t users[SN_SLOTS / 64]; /* slots that ever mapped this segment */
	_Atomic uint32_t num_members;
	struct sn_member members[SN_MEMBERS];
	struct sn_pool pools[SN_POOLS];
	struct sn_claim claims[SN_CLAIMS];
};

#define SN_PAGE 4096ULL
#define SN_ROUND(n) (((uint64_t)(n) + SN_PAGE - 1) & ~(SN_PAGE - 1))
#define SN_QP_TABLE SN_ROUND(sizeof(struct sn_seg))
#define SN_CQ_TABLE (SN_QP_TABLE + SN_ROUND(SN_QPS * sizeof(struct sn_qp)))
#define SN_SRQ_TABLE (SN_CQ_TABLE + SN_ROUND(SN_CQS * sizeof(struct sn_cq)))
#define SN_MR_TABLE (SN_SRQ_TABLE + SN_ROUND(SN_SRQS * sizeof(struct sn_srq)))
#define SN_HEAP (SN_MR_TABLE + SN_ROUND(SN_MRS * sizeof(struct sn_mr)))

static inline void *sn_at(struct sn_seg *seg, uint64_t offset)
{
	return (char *)seg + offset;
}
static inline struct sn_qp *sn_qp_at(struct sn_seg *seg, uint32_t i)
{
	return (struct sn_qp *)sn_at(seg, SN_QP_TABLE) + i;
}
static inline struct sn_cq *sn_cq_at(struct sn_seg *seg, uint32_t i)
{
	return (struct sn_cq *)sn_at(seg, SN_CQ_TABLE) + i;
}
static inline struct sn_srq *sn_srq_at(struct sn_seg *seg, uint32_t i)
{
	return (struct sn_srq *)sn_at(seg, SN_SRQ_TABLE) + i;
}
static inline struct sn_mr *sn_mr_at(struct sn_seg *seg, uint32_t i)
{
	return (struct sn_mr *)sn_at(seg, SN_MR_TABLE) + i;
}
static inline struct sn_rwqe *sn_rwqe_at(struct sn_seg *seg, const struct sn_rq *rq, uint32_t i)
{
	return sn_at(seg, rq->wqes + (uint64_t)i * rq->stride);
}
static inline struct sn_rslot *sn_rslot_at(struct sn_seg *seg, const struct sn_rq *rq, uint32_t i)
{
	return sn_at(seg, rq->wqes + (uint64_t)i * rq->stride + rq->slot);
}
/* The entry that was posted at position `pos` of the queue. */
static inline uint32_t sn_rq_item(struct sn_seg *seg, const struct sn_rq *rq, uint32_t pos)
{
	/* atomic: prefetch_next() looks at an entry that may be a new one by then */
	return rq->ordered ? pos & (rq->size - 1)
			   : atomic_load_explicit((_Atomic uint32_t *)sn_at(seg, rq->ring) + (pos & (rq->size - 1)),
						  memory_order_relaxed);
}
static inline struct sn_swqe *sn_swqe_at(struct sn_seg *seg, const struct sn_sq *sq, uint32_t pos)
{
	return sn_at(seg, sq->wqes + (uint64_t)(pos & (sq->size - 1)) * sq->stride);
}
static inline struct sn_rq *sn_rq_of(struct sn_seg *seg, struct sn_qp *qp)
{
	return qp->srq >= 0 ? &sn_srq_at(seg, qp->srq)->rq : &qp->rq;
}

_Static_assert(sizeof(struct sn_cqe) == 64, "a completion is one cache line");
_Static_assert(sizeof(struct sn_rslot) == 256, "a small receive is a few whole cache lines");
_Static_assert(sizeof(struct sn_event) == 8, "an event is written in one piece");
_Static_assert(SN_HEAP < SN_SEG_SIZE / 2, "tables leave room for the heap");

#endif
