/* Every verb on every kind of inherited object, in a child that was forked while another thread of the
 * parent was in the middle of verbs: it fails or does nothing, takes no signal, waits for no lock that
 * nobody will give back, and the parent does not notice. Then the child uses the device for itself,
 * runs a program, or just ends. */
#include <dirent.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "pair.h"

int softnic_alloc(struct ibv_context *, size_t, void **);
int softnic_free(struct ibv_context *, void *, size_t);

static struct end e[2];
static struct ibv_cq_ex *cq_ex;
static struct ibv_qp *qp_ex;
static struct ibv_mw *mw;
static struct ibv_dm *dm;
static struct ibv_ah *ah;
static void *pool;
static _Atomic int stop, rounds;

/* Each returns 1 if the verb refused or did nothing. */
#define VERB(name, ...) static int name(void) { __VA_ARGS__ }
VERB(v_post_send, return post(&e[0], IBV_WR_SEND, 1, 0, 8, NULL, 0) != 0;)
VERB(v_post_recv, return post_recv(&e[0], 1, 0, 8) != 0;)
VERB(v_poll, struct ibv_wc wc; return ibv_poll_cq(e[0].cq, 1, &wc) < 0;)
VERB(v_notify, return ibv_req_notify_cq(e[0].cq, 0) != 0;)
VERB(v_srq, struct ibv_srq_init_attr a = { .attr = { 8, 1, 0 } }; return !ibv_create_srq(e[0].pd, &a);)
VERB(v_srq_post, struct ibv_recv_wr wr = { .num_sge = 0 }, *bad; return ibv_post_srq_recv(e[1].srq, &wr, &bad) != 0;)
VERB(v_srq_modify, struct ibv_srq_attr a = { 0 }; return ibv_modify_srq(e[1].srq, &a, IBV_SRQ_LIMIT) != 0;)
VERB(v_srq_query, struct ibv_srq_attr a; ibv_query_srq(e[1].srq, &a); return 1;)
VERB(v_srq_destroy, ibv_destroy_srq(e[1].srq); return 1;)
VERB(v_event, struct ibv_cq *cq; void *c; return ibv_get_cq_event(e[0].channel, &cq, &c) < 0;)
VERB(v_async, struct ibv_async_event ev; return ibv_get_async_event(e[0].ctx, &ev) < 0;)
VERB(v_alloc_pd, return !ibv_alloc_pd(e[0].ctx);)
VERB(v_dealloc_pd, ibv_dealloc_pd(e[0].pd); return 1;)
VERB(v_reg, return !ibv_reg_mr(e[0].pd, e[0].buf, 4096, ALL_ACCESS);)
VERB(v_rereg, return ibv_rereg_mr(e[0].mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) != 0;)
VERB(v_dereg, ibv_dereg_mr(e[0].mr); return 1;)
VERB(v_create_cq, return !ibv_create_cq(e[0].ctx, 16, NULL, NULL, 0);)
VERB(v_resize_cq, return ibv_resize_cq(e[0].cq, 512) != 0;)
VERB(v_destroy_cq, ibv_destroy_cq(e[0].cq); return 1;)
VERB(v_create_qp, struct ibv_qp_init_attr a = { .send_cq = e[0].cq, .recv_cq = e[0].cq, .qp_type = IBV_QPT_RC,
						.cap = { 1, 1, 1, 1, 0 } }; return !ibv_create_qp(e[0].pd, &a);)
VERB(v_modify_qp, struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR }; return ibv_modify_qp(e[0].qp, &a, IBV_QP_STATE) != 0;)
VERB(v_query_qp, struct ibv_qp_attr a; struct ibv_qp_init_attr i; ibv_query_qp(e[0].qp, &a, IBV_QP_STATE, &i); return 1;)
VERB(v_destroy_qp, ibv_destroy_qp(e[0].qp); return 1;)
VERB(v_channel, return !ibv_create_comp_channel(e[0].ctx);)
VERB(v_destroy_channel, ibv_destroy_comp_channel(e[0].channel); return 1;)
VERB(v_query_device, struct ibv_device_attr a; ibv_query_device(e[0].ctx, &a); return 1;)
VERB(v_query_port, struct ibv_port_attr a; ibv_query_port(e[0].ctx, 1, &a); return 1;)
VERB(v_query_gid, union ibv_gid g; ibv_query_gid(e[0].ctx, 1, 1, &g); return 1;)
VERB(v_ah, struct ibv_ah_attr a = { .is_global = 1, .port_num = 1 }; return !ibv_create_ah(e[0].pd, &a);)
VERB(v_destroy_ah, ibv_destroy_ah(ah); return 1;)
VERB(v_cq_ex, struct ibv_cq_init_attr_ex a = { .cqe = 16 }; return !ibv_create_cq_ex(e[0].ctx, &a);)
VERB(v_start_poll, struct ibv_poll_cq_attr a = { 0 }; return ibv_start_poll(cq_ex, &a) != 0;)
VERB(v_wr, struct ibv_qp_ex *q = ibv_qp_to_qp_ex(qp_ex); ibv_wr_start(q); q->wr_id = 1; ibv_wr_send(q);
     ibv_wr_set_sge(q, e[0].mr->lkey, (uintptr_t)e[0].buf, 8); return ibv_wr_complete(q) != 0;)
VERB(v_wr_abort, struct ibv_qp_ex *q = ibv_qp_to_qp_ex(qp_ex); ibv_wr_start(q); ibv_wr_abort(q); return 1;)
VERB(v_alloc_mw, return !ibv_alloc_mw(e[0].pd, IBV_MW_TYPE_1);)
VERB(v_bind_mw, struct ibv_mw_bind b = { .bind_info = { e[0].mr, (uintptr_t)e[0].buf, 64, IBV_ACCESS_REMOTE_READ } };
     return mw == NULL || ibv_bind_mw(e[0].qp, mw, &b) != 0;)
VERB(v_dealloc_mw, if (mw) ibv_dealloc_mw(mw); return 1;)
VERB(v_alloc_dm, struct ibv_alloc_dm_attr a = { .length = 64 }; ibv_alloc_dm(e[0].ctx, &a); return 1;) /* some of its own, at most */
VERB(v_copy_dm, char c[8]; return dm == NULL || ibv_memcpy_from_dm(c, dm, 0, 8) != 0;)
VERB(v_free_dm, if (dm) ibv_free_dm(dm); return 1;)
VERB(v_alloc, void *p; return softnic_alloc(e[0].ctx, 4096, &p) != 0;)
VERB(v_free, softnic_free(e[0].ctx, pool, 8192); return 1;)
VERB(v_import, return !ibv_import_device(dup(e[0].ctx->cmd_fd)) || 1;)
VERB(v_close, ibv_close_device(e[0].ctx); ibv_close_device(e[1].ctx); return 1;)
VERB(v_nothing, return 1;)

#define ROW(f) { #f, v_##f }
static const struct { const char *name; int (*f)(void); } verb[] = {
	ROW(post_send), ROW(post_recv), ROW(poll), ROW(notify), ROW(srq), ROW(srq_post), ROW(srq_modify), ROW(srq_query),
	ROW(srq_destroy), ROW(event), ROW(async), ROW(alloc_pd), ROW(dealloc_pd), ROW(reg), ROW(rereg), ROW(dereg),
	ROW(create_cq), ROW(resize_cq), ROW(destroy_cq), ROW(create_qp), ROW(modify_qp), ROW(query_qp), ROW(destroy_qp),
	ROW(channel), ROW(destroy_channel), ROW(query_device), ROW(query_port), ROW(query_gid), ROW(ah), ROW(destroy_ah),
	ROW(cq_ex), ROW(start_poll), ROW(wr), ROW(wr_abort), ROW(alloc_mw), ROW(bind_mw), ROW(dealloc_mw), ROW(alloc_dm),
	ROW(copy_dm), ROW(free_dm), ROW(alloc), ROW(free), ROW(import), ROW(close), ROW(nothing),
};

/* Control and data path at once, so that forks hit the middle of both. */
static void *busy(void *arg)
{
	(void)arg;
	while (!atomic_load(&stop)) {
		struct ibv_mr *mr = ibv_reg_mr(e[0].pd, e[0].buf, 4096, ALL_ACCESS);
		struct ibv_cq *cq = ibv_create_cq(e[0].ctx, 16, NULL, NULL, 0);
		CHECK(mr && cq);
		CHECK(post_recv(&e[1], 1, 0, 4096) == 0 && post(&e[0], IBV_WR_SEND, 2, 0, 4096, NULL, 0) == 0);
		expect(&e[0], 2, IBV_WC_SUCCESS);
		expect(&e[1], 1, IBV_WC_SUCCESS);
		CHECK(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0);
		atomic_fetch_add(&rounds, 1);
	}
	return NULL;
}

static void device_files(int *n) /* open descriptors on our files */
{
	char path[300], to[300];
	DIR *d = opendir("/proc/self/fd");
	*n = 0;
	for (struct dirent *f; d && (f = readdir(d));) {
		snprintf(path, sizeof(path), "/proc/self/fd/%s", f->d_name);
		ssize_t len = readlink(path, to, sizeof(to) - 1);
		if (len > 0) {
			to[len] = 0;
			*n += strstr(to, "rocecomm") != NULL;
		}
	}
	closedir(d);
}

static void child(unsigned i)
{
	alarm(10);
	if (!verb[i].f()) {
		fprintf(stderr, "%s on an inherited object succeeded in the child\n", verb[i].name);
		_exit(1);
	}
	if (i % 3 == 0) {
		struct end own[2];
		struct options o = usual;
		o.len = 4096;
		pair_open(own, &o);
		CHECK(post_recv(&own[1], 1, 0, 8) == 0 && post(&own[0], IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0);
		expect(&own[0], 2, IBV_WC_SUCCESS);
		expect(&own[1], 1, IBV_WC_SUCCESS);
		if (i % 2)
			pair_close(own);
	}
#ifndef __SANITIZE_ADDRESS__ /* which takes what the parent's thread held for leaks of the child */
	if (i % 5 == 0)
		exit(0); /* with destructors */
#endif
	_exit(0);
}

int main(int argc, char **argv)
{
	pthread_t thread;
	struct options o = usual;
	int status, before;
	if (argc > 1) { /* after exec: nothing of the device came along */
		device_files(&before);
		return before != 0;
	}
	o.channel = 1;
	end_open(&e[0], &o);
	o.srq = 16;
	end_open(&e[1], &o);
	o.srq = 0;
	CHECK(to_rts(&e[0], e[1].qp->qp_num, &o) == 0 && to_rts(&e[1], e[0].qp->qp_num, &o) == 0);
	struct ibv_cq_init_attr_ex ca = { .cqe = 16 };
	CHECK(cq_ex = ibv_create_cq_ex(e[0].ctx, &ca));
	struct ibv_qp_init_attr_ex qa = { .send_cq = e[0].cq, .recv_cq = e[0].cq, .qp_type = IBV_QPT_RC, .pd = e[0].pd,
					  .cap = { 4, 4, 1, 1, 0 },
					  .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					  .send_ops_flags = IBV_QP_EX_WITH_SEND };
	CHECK(qp_ex = ibv_create_qp_ex(e[0].ctx, &qa));
	mw = ibv_alloc_mw(e[0].pd, IBV_MW_TYPE_1);
	struct ibv_alloc_dm_attr da = { .length = 64 };
	dm = ibv_alloc_dm(e[0].ctx, &da);
	struct ibv_ah_attr aa = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1, .hop_limit = 64 } };
	CHECK(ibv_query_gid(e[0].ctx, 1, 1, &aa.grh.dgid) == 0);
	CHECK(ah = ibv_create_ah(e[0].pd, &aa));
	CHECK(softnic_alloc(e[0].ctx, 8192, &pool) == 0);
	memset(pool, 7, 8192);
	device_files(&before);
	CHECK(before > 0);
	CHECK(pthread_create(&thread, NULL, busy, NULL) == 0);
	unsigned n = sizeof(verb) / sizeof(verb[0]);
	for (unsigned i = 0; i < n; i++) {
		usleep(i * 137 % 700);
		pid_t pid = fork();
		CHECK(pid >= 0);
		if (pid == 0)
			child(i);
		CHECK(waitpid(pid, &status, 0) == pid);
		if (status) {
			fprintf(stderr, "%s in the child: %s %d\n", verb[i].name, WIFSIGNALED(status) ? "signal" : "status",
				WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
			return 1;
		}
	}
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		execl("/proc/self/exe", argv[0], "after exec", NULL);
		_exit(2);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	int seen = atomic_load(&rounds);
	for (double until = seconds() + 10; atomic_load(&rounds) < seen + 10;)
		CHECK(seconds() < until); /* the parent never noticed */
	atomic_store(&stop, 1);
	CHECK(pthread_join(thread, NULL) == 0);
	for (int i = 0; i < 8192; i++)
		CHECK(((char *)pool)[i] == 7);
	CHECK(softnic_free(e[0].ctx, pool, 8192) == 0);
	CHECK(ibv_destroy_ah(ah) == 0);
	if (dm)
		CHECK(ibv_free_dm(dm) == 0);
	if (mw)
		CHECK(ibv_dealloc_mw(mw) == 0);
	CHECK(ibv_destroy_qp(qp_ex) == 0 && ibv_destroy_cq(ibv_cq_ex_to_cq(cq_ex)) == 0);
	pair_close(e);
	return 0;
}
