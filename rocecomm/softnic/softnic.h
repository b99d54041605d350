/* Process-private objects of the user-space device and the functions between its files.
 * Conventions: int functions return 0 or a positive errno unless they say otherwise. */
#ifndef SN_SOFTNIC_H
#define SN_SOFTNIC_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>

#include "layout.h"

#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define SN_EXPORT __attribute__((visibility("default")))
#define sn_container(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))
#define SN_LOCK_WAIT_NS 2000000000ULL /* a holder that lives but is stopped: give up after this */
#define SN_RETRY_NOW UINT64_MAX

/* Another context's segment, mapped here. */
struct sn_peer {
	sn_id id;
	int pid;
	bool local;  /* of this process: plain memcpy reaches its memory */
	bool staged; /* process_vm does not work: bytes go through staging memory */
	int seg_fd;  /* then; else -1 */
	_Atomic bool dead;
	_Atomic bool shunned; /* dead on request: for the work requests of this context only */
	_Atomic uint32_t lock; /* of fifo[] and pool[] */
	struct sn_seg *seg;
	struct sn_mapping *mapping;
	struct sn_peer *retired; /* an earlier owner of the same slot */
	_Atomic uint64_t next_probe; /* when its life is next looked at */
	struct { uint32_t number; int fd; } fifo[8];
	struct { uint32_t serial, want, uses; char *addr; uint64_t length; } pool[SN_POOLS];
};

struct sn_channel {
	struct ibv_comp_channel ibv; /* fd is an epoll fd over the three below */
	struct sn_ctx *ctx;
	uint32_t number;
	int fifo, timer;
	pthread_mutex_t lock;
	uint64_t timer_at;
	struct { sn_id id; int fd; } death[64];
	uint32_t num_death;
};

struct sn_priv_td {
	struct ibv_td ibv;
	_Atomic int users;
};

struct sn_priv_pd {
	struct ibv_pd ibv;
	_Atomic int users;     /* objects made with this handle */
	struct sn_priv_pd *of; /* a parent domain or an import: the domain that it stands for */
	struct sn_priv_td *td;
	bool unimported; /* goes with its last user */
	struct sn_priv_pd *next;
};

struct sn_priv_mr {
	struct ibv_mr ibv;
	uint32_t index;
	bool imported; /* a second handle: the region is not ours to end */
	_Atomic int *dm_users; /* it lies in device memory */
};

struct sn_priv_cq {
	union {
		struct ibv_cq ibv;
		struct ibv_cq_ex ex; /* begins with the plain one */
	};
	struct sn_cq *cq;
	uint32_t index;
	_Atomic int users;
	_Atomic uint32_t poll_lock;
	_Atomic uint64_t glance; /* count of changes << 38 | ring << 8 | log2(size) */
	_Atomic uint32_t pending; /* some QP of this CQ may have work that waits */
	_Atomic uint32_t held_back; /* an error waits behind what the last poll returned */
	uint64_t late_since; /* the next completion waits for its payload since then */
	_Atomic uint32_t patience; /* empty polls before a yield */
	_Atomic uint32_t empty_polls; /* relaxed: several threads may poll */
	uint32_t events_seen, async_seen;
	struct sn_priv_qp *senders; /* QPs that complete their sends here */
	uint64_t stamp;		    /* of the completion that was taken last */
	struct ibv_wc now;	    /* between start_poll and end_poll: the current one */
	_Atomic uint32_t session;   /* a lock: who is between the two, and may call anything else there */
};

/* Entries of a receive queue that are free to post, in the owner only. */
struct sn_free_list {
	uint32_t *item;
	uint32_t count, size;
	_Atomic uint32_t lock;
};

struct sn_priv_srq {
	struct ibv_srq ibv;
	struct sn_srq *srq;
	uint32_t index;
	_Atomic int users;
	uint32_t async_seen;
	uint64_t heap, heap_len;
	struct sn_free_list free;
	/* Serial of the posting of each entry that came back last. That a received message gave its entry back is known
	 * here only: the entry's slot belongs to its sender's CPU, and to fetch it costs as much as the message. */
	_Atomic uint32_t *given;
};
static inline bool sn_srq_given(struct sn_priv_srq *srq, uint32_t item, uint32_t serial)
{
	return (int32_t)(atomic_load_explicit(&srq->given[item], memory_order_acquire) - serial) >= 0;
}
/* With the poll lock of its queue pair's CQ. False: that posting of the entry came back before. */
static inline bool sn_srq_give(struct sn_priv_srq *srq, uint32_t item, uint32_t serial)
{
	if (sn_srq_given(srq, item, serial))
		return false;
	atomic_store_explicit(&srq->given[item], serial, memory_order_release);
	return true;
}

/* What the fault rules decided about the request at `position` - 1. */
struct sn_hold {
	uint32_t position, epoch;
	uint32_t kind; /* enum sn_fault_kind */
	enum ibv_wc_status status, then;
	uint64_t until, silent_until, id;
};

struct sn_priv_qp {
	union {
		struct ibv_qp ibv;
		struct ibv_qp_ex ex; /* begins with the plain one */
	};
	bool extended; /* made for ibv_wr_* */
	struct {       /* between wr_start and wr_complete, under the post lock */
		int err;
		uint32_t tail;
		struct sn_swqe *open;
		bool needs_address; /* of a datagram that has none yet */
	} wr;
	struct sn_ctx *ctx;
	struct sn_qp *qp;
	uint32_t index;
	_Atomic uint32_t post_lock;
	struct sn_peer *_Atomic peer;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	uint32_t async_seen;
	/* since when the same executor holds our queue at the same entry */
	_Atomic uint32_t stuck_lock;
	_Atomic uint64_t stuck_since;
	sn_id stuck_holder;
	uint32_t stuck_head;
	uint64_t heap, heap_len;
	_Atomic uint32_t reaped; /* completions of sends that were polled */
	struct sn_free_list free;
	/* of a receive queue whose entries are used in turn: how many came back, and flushes under way that have none */
	_Atomic uint32_t given_back, without_entry;
	struct sn_priv_qp *next_sender;
	bool destroying;
	/* it failed, and the peer may die with receives of ours in its hands; seen once since RESET */
	_Atomic bool mourning, mourned;
	uint64_t mourn_at;
	struct sn_hold hold; /* under the exec lock */
	bool dirty; /* a RESET or destroy was refused: the queues are not empty yet */
};

/* A segment's mapping. Contexts of one process share it, so that a sanitizer sees both ends use
 * the same words; it goes with its last user. */
struct sn_mapping {
	struct sn_seg *seg;
	_Atomic int users;
};

struct sn_extent { uint64_t at, len; };

struct sn_ctx {
	struct verbs_context vctx; /* vctx.context is what the program sees */
	pid_t pid;
	sn_id id;
	struct sn_seg *seg;
	struct sn_mapping *mapping;
	int seg_fd;
	_Atomic uint32_t stage_stop;
	pthread_t stage_thread; /* while the segment has staging memory */
	uint64_t instance; /* the word that peers read to learn whether they may */
	int async_fifo;
	pthread_mutex_t lock; /* control path; taken before a CQ's poll_lock, never inside a drive */
	pthread_mutex_t peer_lock; /* of peers[], innermost */
	struct sn_extent *holes;
	uint32_t num_holes, room_holes;
	struct sn_priv_dm *dms;
	uint64_t dm_used;
	_Atomic int opens; /* ibv_open_device and ibv_import_device, less closes */
	struct sn_priv_pd *pds;
	struct sn_priv_qp *qps[SN_QPS];
	struct sn_priv_cq *cqs[SN_CQS];
	struct sn_priv_srq *srqs[SN_SRQS];
	struct sn_peer *peers[SN_SLOTS];
	uint32_t next_qp, next_cq, next_srq, next_pd, next_mr, next_channel, next_pool, next_dm;
	uint32_t key_start; /* where the tags of memory keys begin */
	_Atomic int windows;	      /* memory windows alive */
	_Atomic uint32_t window_lock; /* who binds or invalidates one */
	_Atomic int objects; /* PDs, channels and CQs alive; and 1 while it is open */
	_Atomic uint32_t pool_lock; /* of pool[] and the pools of the segment */
	struct sn_memory *pool[SN_POOLS];
	struct sn_ctx *next;
};

/* One end of a connection as the executor sees it. */
struct sn_side {
	struct sn_seg *seg;
	struct sn_qp *qp;
	struct sn_peer *peer; /* NULL: the executor's own context */
};

/* ---- reason.c */
int sn_because(int err, const char *format, ...) __attribute__((format(printf, 2, 3))); /* returns err */
void sn_tell(int err); /* the same to stderr, for a stock program */

/* ---- lock.c */
extern pid_t sn_pid; /* of this process, renewed after fork */
uint64_t sn_now(void);
uint64_t sn_now_coarse(void);
bool sn_try_lock(struct sn_ctx *ctx, struct sn_lock *l);
bool sn_lock(struct sn_ctx *ctx, struct sn_lock *l); /* false: the holder is stopped */
void sn_unlock_mine(struct sn_ctx *ctx, struct sn_lock *l);
static inline void sn_unlock(struct sn_lock *l) /* only the dead lose such a lock */
{
	atomic_store_explicit(&l->owner, 0, memory_order_release);
}
/* The staging helper and the executors of its process take turns by way of the peer, another process,
 * who asks the one and gives its queue to the others. There the thread sanitizer does not look: it is
 * told here. */
#if defined(__SANITIZE_THREAD__)
void __tsan_acquire(void *);
void __tsan_release(void *);
static inline void sn_helper_done(struct sn_ctx *ctx) { __tsan_release(&ctx->seg_fd); }
static inline void sn_helper_seen(struct sn_ctx *ctx) { __tsan_acquire(&ctx->seg_fd); }
#else
static inline void sn_helper_done(struct sn_ctx *ctx) { (void)ctx; }
static inline void sn_helper_seen(struct sn_ctx *ctx) { (void)ctx; }
#endif
static inline void sn_fence_after_rmw(void) /* where a locked instruction is a full fence already */
{
#if defined(__x86_64__)
	atomic_signal_fence(memory_order_seq_cst);
#else
	atomic_thread_fence(memory_order_seq_cst);
#endif
}
void sn_spin(_Atomic uint32_t *l);
static inline void sn_unspin(_Atomic uint32_t *l)
{
	atomic_store_explicit(l, 0, memory_order_release);
}
static inline void sn_prefetch_write(const void *p) /* the line is about to be ours alone */
{
#if defined(__x86_64__)
	__asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)p));
#else
	__builtin_prefetch(p, 1);
#endif
}
static inline void sn_pause(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#else
	__asm__ __volatile__("" ::: "memory");
#endif
}

/* ---- fabric.c */
void sn_fabric_forked(void);
int sn_fabric_join(struct sn_ctx *ctx);	  /* claims a slot, creates the segment */
void sn_fabric_leave(struct sn_ctx *ctx); /* gives both back; the last one out removes all */
bool sn_alive(sn_id id);
sn_id sn_slot_id(uint32_t slot);
void sn_each_context(void (*visit)(struct sn_ctx *, void *), void *arg);
struct sn_mapping *sn_local_mapping(sn_id id); /* of a context of this very process, one more user */
const char *sn_fabric_base(void);
int sn_fabric_path(char *buf, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- segment.c */
int sn_no_room(int err, uint64_t len, const char *name);
int sn_seg_create(struct sn_ctx *ctx);
int sn_seg_grow(struct sn_ctx *ctx, _Atomic uint32_t *limit, uint64_t table, size_t entry, uint32_t need);
int sn_heap_get(struct sn_ctx *ctx, uint64_t len, uint64_t *at);
void sn_heap_put(struct sn_ctx *ctx, uint64_t at, uint64_t len);
void sn_heap_free(struct sn_ctx *ctx);
struct sn_mapping *sn_mapping_new(struct sn_seg *seg);
void sn_mapping_put(struct sn_mapping *m);

/* ---- peer.c */
struct sn_peer *sn_peer_get(struct sn_ctx *ctx, uint32_t slot, int *err);
bool sn_may_read(struct sn_seg *seg);
bool sn_peer_dead(struct sn_peer *peer, uint64_t now);
void sn_peer_event(struct sn_peer *peer, uint32_t number, const struct sn_event *event);
char *sn_peer_pool(struct sn_peer *peer, const struct sn_mr *mr, uint64_t offset, uint64_t length);
void sn_peers_free(struct sn_ctx *ctx);

/* ---- domain.c */
void sn_pd_get(struct ibv_pd *pd);
void sn_pd_put(struct ibv_pd *pd);
struct ibv_td *sn_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr);
int sn_dealloc_td(struct ibv_td *td);
struct ibv_pd *sn_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);

/* ---- dm.c */
struct ibv_dm *sn_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr);
int sn_free_dm(struct ibv_dm *dm);
struct ibv_mr *sn_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length, unsigned access);

/* ---- mcast.c */
bool sn_mcast_has(struct sn_ctx *ctx, uint32_t qpn);
bool sn_mcast_each(struct sn_ctx *ctx, const struct sn_swqe *w, void (*visit)(void *arg, uint32_t qpn), void *arg);

/* ---- ah.c */
void sn_ah_address(struct sn_qp *qp, struct sn_swqe *w, const struct ibv_ah *ah, uint32_t qpn, uint32_t qkey);
void sn_ah_header(const struct sn_swqe *w, uint8_t header[40]);

/* ---- mr.c */
int sn_advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sge, uint32_t n);
struct ibv_mr *sn_reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access, bool dm);
int sn_mr_take(struct sn_ctx *ctx, uint32_t *index); /* an entry of the table; with ctx->lock held */
bool sn_mr_covers(struct sn_seg *seg, uint32_t key, const struct sn_qp *qp, uint32_t need, uint64_t addr,
		  uint64_t length, struct sn_mr *copy);
bool sn_mr_claim(struct sn_claim *claim, const struct sn_side *t, uint32_t key, uint32_t need, uint64_t addr,
		 uint64_t length, struct sn_mr *copy);

/* ---- mw.c */
struct ibv_mw *sn_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int sn_dealloc_mw(struct ibv_mw *mw);
int sn_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
void sn_mw_describe(struct sn_swqe *w, const struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info);
bool sn_mw_invalidate_remote(const struct sn_side *t, uint32_t key);
bool sn_mw_bound_to(struct sn_ctx *ctx, uint32_t lkey);
void sn_mw_qp_gone(struct sn_ctx *ctx, uint32_t qpn);

/* ---- vma.c */
struct sn_vma {
	uint64_t start, end, offset, inode, device;
	bool readable, writable, shared;
	char path[4096]; /* of the file, if it was asked for */
};
int sn_vma_check(uintptr_t addr, size_t length, bool write, struct sn_vma *vma);
int sn_vma_open(struct sn_vma *vma);

/* ---- pool.c */
void sn_pool_find(struct sn_ctx *ctx, uintptr_t addr, uint64_t length, struct sn_vma *vma, struct sn_mr *mr);
void sn_pool_release(struct sn_ctx *ctx, struct sn_mr *mr);
void sn_pool_forked(void);

/* ---- claim.c */
struct sn_claim *sn_claim_begin(struct sn_ctx *ctx, const struct sn_side *r, const struct sn_side *t);
bool sn_claim_another(struct sn_claim *c, int side, uint32_t key);
/* True: the claim did not cover this key yet, and must be published before the key is looked at. */
static inline bool sn_claim_name(struct sn_claim *c, int side, uint32_t key)
{
	return !(atomic_load_explicit(&c->num_keys[side], memory_order_relaxed) &&
		 atomic_load_explicit(&c->key[side][0], memory_order_relaxed) == key) &&
	       sn_claim_another(c, side, key);
}
void sn_claim_publish(void);
void sn_claim_key(struct sn_claim *c, int side, uint32_t key);
void sn_claim_end(struct sn_claim *c);
bool sn_wait_claims(struct sn_ctx *ctx, uint32_t qpn, uint32_t key);

/* ---- cq.c */
int sn_cq_push(struct sn_ctx *ctx, const struct sn_side *side, uint32_t cq, const struct sn_cqe *cqe, bool solicited);
struct sn_priv_cq *sn_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				struct ibv_comp_channel *channel, int comp_vector, uint32_t kind);
int sn_cq_take(struct sn_ctx *ctx, struct sn_priv_cq *cq, int n, struct ibv_wc *wc);
bool sn_cq_was_empty(struct sn_priv_cq *cq);
int sn_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int sn_req_notify_cq(struct ibv_cq *cq, int solicited_only);
bool sn_cq_kick(struct sn_priv_cq *cq);
void sn_cq_purge(struct sn_ctx *ctx, struct sn_priv_cq *cq, uint32_t qpn);
bool sn_cq_has_receive(struct sn_ctx *ctx, uint32_t cq, uint32_t qpn, uint32_t entry, uint32_t serial);

/* ---- cq_ex.c */
struct ibv_cq_ex *sn_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
int sn_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values);

/* ---- poll.c */
#define SN_PATIENCE 300u /* empty polls before a yield, to begin with */
bool sn_cq_give_back(struct sn_ctx *ctx, const struct sn_cqe *e, struct sn_priv_qp *qp);

/* ---- channel.c */
void sn_channel_wake_at(struct sn_channel *ch, uint64_t at); /* at the latest */
void sn_channel_connected(struct sn_priv_qp *qp, struct sn_peer *peer);
void sn_channel_watch(struct sn_priv_qp *qp); /* deadlines and deaths must wake a sleeper */
void sn_channel_notify(struct sn_ctx *ctx, const struct sn_side *side, uint32_t channel, uint32_t cq, uint32_t epoch);
int sn_async_open(struct sn_ctx *ctx);
void sn_async_raise(struct sn_ctx *ctx, const struct sn_side *side, enum ibv_event_type type, uint32_t index,
		    uint32_t epoch);

/* ---- rq.c */
#define SN_NO_ENTRY UINT32_MAX
uint32_t sn_round_pow2(uint32_t n);
void sn_rq_empty(struct sn_seg *seg, struct sn_rq *rq);
uint64_t sn_rq_bytes(uint32_t size, uint32_t max_sge);
void sn_rq_init(struct sn_seg *seg, struct sn_rq *rq, uint64_t at, uint32_t size, uint32_t max_sge, bool ordered);
int sn_free_list_init(struct sn_free_list *f, uint32_t size, uint32_t usable);
void sn_free_list_put(struct sn_free_list *f, uint32_t item);
int sn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int sn_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
void sn_rq_flush(struct sn_ctx *ctx, const struct sn_side *side);
void sn_rq_flush_taken(struct sn_priv_qp *qp);
bool sn_rq_has_taken(struct sn_priv_qp *qp);
void sn_srq_reclaim(struct sn_priv_qp *qp);

/* ---- send.c */
int sn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
bool sn_sq_takes(uint32_t type, uint32_t opcode);
bool sn_sq_inlines(uint32_t opcode);
int sn_sq_ready(struct sn_priv_qp *qp);
uint32_t sn_sq_room(struct sn_priv_qp *qp, uint32_t tail);
void sn_sq_publish(struct sn_priv_qp *qp, uint32_t tail);

/* ---- qp_ex.c */
struct ibv_qp *sn_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* ---- exec.c */
bool sn_qp_busy(struct sn_qp *qp);
bool sn_drive(struct sn_priv_qp *qp);	   /* own send queue; true: something moved */
bool sn_drive_peer(struct sn_priv_qp *qp); /* the send queue of the QP that this one is connected to */
struct sn_side sn_own_side(struct sn_priv_qp *qp);
bool sn_peer_side(struct sn_priv_qp *qp, struct sn_side *side);
uint64_t sn_rnr_timer_ns(uint8_t code);

/* ---- qp_fail.c */
bool sn_qp_mourn(struct sn_priv_qp *qp);
bool sn_qp_fail(struct sn_ctx *ctx, const struct sn_side *side);
bool sn_qp_set_error(const struct sn_side *side);
void sn_flush_receives(struct sn_ctx *ctx, const struct sn_side *side);

/* ---- fault.c, fault_act.c */
extern _Atomic uint32_t *sn_faults, sn_no_faults;
static inline bool sn_faulty(void) /* is anything injected in this fabric? */
{
	return __builtin_expect(atomic_load_explicit(sn_faults, memory_order_relaxed) != 0, 0);
}
enum sn_fault_do { SN_FAULT_NONE, SN_FAULT_WAIT, SN_FAULT_DONE };
int sn_fault_check_environment(void);
int sn_fault_opened(struct sn_ctx *ctx);
void sn_fault_closed(struct sn_ctx *ctx);
void sn_faults_forked(void);
bool sn_fault_port_down(struct sn_ctx *ctx);
bool sn_fault_leave_to(const struct sn_side *r, const struct sn_side *t);
enum ibv_wc_status sn_fault_receive(struct sn_priv_qp *qp);
void sn_fault_wake(struct sn_seg *seg);
bool sn_fault_kick(struct sn_ctx *ctx);
void sn_fault_before_sleep(struct sn_channel *ch);
enum sn_verb { /* those that can be refused; names in fault_rule.c */
	SN_ALLOC_PD, SN_REG_MR, SN_DEREG_MR, SN_CREATE_COMP_CHANNEL, SN_CREATE_CQ, SN_DESTROY_CQ, SN_CREATE_SRQ,
	SN_DESTROY_SRQ, SN_CREATE_QP, SN_MODIFY_QP, SN_DESTROY_QP, SN_VERBS
};
int sn_fault_verb(struct sn_ctx *ctx, enum sn_verb verb);
static inline int sn_refused(struct sn_ctx *ctx, enum sn_verb verb) /* the errno of a fault, 0: none */
{
	return sn_faulty() ? sn_fault_verb(ctx, verb) : 0;
}

/* ---- place.c */
bool sn_place_lazy(struct sn_ctx *ctx, const struct sn_side *t, struct sn_claim *claim);
bool sn_place_all(struct sn_ctx *ctx);
enum sn_placed { SN_PLACED, SN_PLACED_LATER, SN_NOT_PLACED };
enum sn_placed sn_place_one(struct sn_ctx *ctx, const struct sn_side *t, uint32_t item, struct sn_claim *claim, bool wait);

/* ---- copy.c */
struct sn_piece { char *ptr; uint64_t addr; uint64_t len; }; /* ptr: reachable here; else addr in the other process */
enum sn_copy_result { SN_COPY_OK, SN_COPY_FAULT, SN_COPY_DEAD };
enum sn_copy_result sn_copy(struct sn_ctx *ctx, const struct sn_side *other, bool write, const struct sn_piece *local,
			    int num_local, const struct sn_piece *far, int num_far, uint64_t length);
void sn_piece_of(struct sn_piece *p, const struct sn_side *side, const struct sn_mr *mr, uint64_t addr, uint64_t length);
#define SN_IOVECS 64
int sn_iovec(struct iovec *iov, const struct sn_piece *p, int num, uint64_t skip, uint64_t length, bool here);
enum sn_copy_result sn_atomic(struct sn_ctx *ctx, const struct sn_side *t, struct sn_piece *where, uint32_t opcode,
			      uint64_t compare_add, uint64_t swap, uint64_t *old);

/* ---- help.c */
bool sn_help_peers(struct sn_ctx *ctx);

/* ---- staging.c */
enum sn_stage_mode { SN_STAGE_NEVER, SN_STAGE_AUTO, SN_STAGE_ALWAYS };
enum sn_stage_mode sn_stage_mode(void);
int sn_stage_connect(struct sn_ctx *ctx, const struct sn_side *peer);
int sn_stage_start(struct sn_ctx *ctx);
void sn_stage_stop(struct sn_ctx *ctx);
void sn_stage_answer(struct sn_ctx *ctx);
void sn_stage_settle(struct sn_ctx *ctx);
bool sn_stage_missing(struct sn_ctx *ctx, const struct sn_side *side);
enum sn_copy_result sn_stage_copy(struct sn_ctx *ctx, const struct sn_side *side, bool write, const struct sn_piece *local,
				  int num_local, const struct sn_piece *far, int num_far, uint64_t length);
enum sn_copy_result sn_stage_atomic(struct sn_ctx *ctx, const struct sn_side *side, uint64_t addr, uint32_t opcode,
				    uint64_t compare_add, uint64_t swap, uint64_t *old);
static inline bool sn_staged(const struct sn_side *side)
{
	return side->peer && side->peer->staged;
}

/* ---- qp.c */
int sn_qp_abandon(struct sn_priv_qp *qp);

/* ---- qp_state.c */
int sn_qp_check_attr(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask);

/* ---- device.c */
unsigned sn_device_number(const struct ibv_device *device);
bool sn_gid(unsigned device, uint32_t index, union ibv_gid *gid);

/* ---- network.c */
#define SN_NETWORK_HOSTS 16 /* more than devices: the last byte of their GIDs */
uint16_t sn_network(void);
bool sn_reachable(const union ibv_gid *gid);
extern const struct ibv_context_ops sn_context_ops;
void sn_object_gone(struct sn_ctx *ctx);
uint64_t sn_max_message(void);
uint64_t sn_max_region(void);
uint32_t sn_mtu_bytes(void);

static inline struct sn_ctx *sn_ctx_of(struct ibv_context *c)
{
	return sn_container(c, struct sn_ctx, vctx.context);
}
/* A peer that cannot reach our memory asks for a helper thread; looked at off the fast path. */
static inline void sn_stage_look(struct sn_ctx *ctx)
{
	if (atomic_load_explicit(&ctx->seg->staging_wanted, memory_order_relaxed) == 1)
		sn_stage_answer(ctx);
}
static inline bool sn_foreign(const struct sn_ctx *ctx) /* inherited through fork: not ours to touch */
{
	return ctx->pid != sn_pid;
}

#endif
