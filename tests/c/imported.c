/* Importing: a copy of a context's cmd_fd leads back to it; domain, region and device memory by handle. */
#include <fcntl.h>
#include <sys/wait.h>

#include "pair.h"

int main(void)
{
	struct end e[2], *a = &e[0], *b = &e[1];
	pair_open(e, &usual);
	struct ibv_context *c = ibv_import_device(dup(b->ctx->cmd_fd));
	CHECK(c && c->device == b->ctx->device && c->async_fd >= 0);
	struct ibv_pd *pd = ibv_import_pd(c, b->pd->handle);
	CHECK(pd && pd != b->pd && pd->handle == b->pd->handle && pd->context == c);
	struct ibv_mr *mr = ibv_import_mr(pd, b->mr->handle);
	CHECK(mr && mr->lkey == b->mr->lkey && mr->rkey == b->mr->rkey && mr->addr == NULL && mr->length == b->len);

	/* a queue pair of the imported domain takes keys of the first one */
	struct end far = *b, near = *a;
	struct ibv_qp_init_attr q = { .send_cq = b->cq, .recv_cq = b->cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	CHECK(far.qp = ibv_create_qp(pd, &q));
	q.send_cq = q.recv_cq = a->cq;
	CHECK(near.qp = ibv_create_qp(a->pd, &q));
	CHECK(to_rts(&far, near.qp->qp_num, &usual) == 0 && to_rts(&near, far.qp->qp_num, &usual) == 0);
	pattern(a->buf, 100, 3);
	CHECK(post(&near, IBV_WR_RDMA_WRITE, 1, 0, 100, b, 0) == 0);
	expect(&near, 1, IBV_WC_SUCCESS);
	CHECK(same(b->buf, 100, 3));

	/* an import is let go; what it refers to stays, and what was made with it may outlive it */
	CHECK(ibv_dereg_mr(mr) == EINVAL);
	ibv_unimport_mr(mr);
	ibv_unimport_pd(pd);
	CHECK(post(&near, IBV_WR_RDMA_WRITE, 2, 0, 100, b, 0) == 0);
	expect(&near, 2, IBV_WC_SUCCESS);
	CHECK(ibv_destroy_qp(far.qp) == 0 && ibv_destroy_qp(near.qp) == 0);
	CHECK(!ibv_import_pd(c, 12345) && errno == ENOENT);
	CHECK(!ibv_import_mr(b->pd, 12345) && errno == ENOENT);

	/* device memory */
	struct ibv_alloc_dm_attr want = { .length = 64 };
	struct ibv_dm *dm = ibv_alloc_dm(b->ctx, &want), *second;
	CHECK(dm && (second = ibv_import_dm(c, dm->handle)));
	char text[8];
	CHECK(ibv_memcpy_to_dm(dm, 8, "12345678", 8) == 0 && ibv_memcpy_from_dm(text, second, 8, 8) == 0);
	CHECK(memcmp(text, "12345678", 8) == 0);
	CHECK(ibv_free_dm(dm) == EBUSY);
	ibv_unimport_dm(second);
	CHECK(ibv_free_dm(dm) == 0);

	/* the context lives until it was closed as often as it was opened and imported */
	CHECK(ibv_close_device(c) == 0);
	CHECK(post(a, IBV_WR_RDMA_WRITE, 3, 0, 100, b, 4096) == 0);
	expect(a, 3, IBV_WC_SUCCESS);

	/* what leads to no context, and what leads to another process's */
	int null = open("/dev/null", O_RDONLY);
	CHECK(!ibv_import_device(null) && errno == EINVAL);
	CHECK(!ibv_import_device(-1) && errno == EBADF);
	close(null);
	pid_t pid = fork();
	if (pid == 0) {
		CHECK(!ibv_import_device(dup(b->ctx->cmd_fd)) && errno == EOPNOTSUPP);
		_exit(0);
	}
	int status;
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	pair_close(e);
	return 0;
}
