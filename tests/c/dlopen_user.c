/* The library as NCCL uses it (NCCL_IBVERBS_LIB): dlopen, each function by dlvsym with its version, no
 * libibverbs anywhere. Needs no symbol of the program that loads it. */
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "pair.h"

#undef ibv_query_port
#undef ibv_reg_mr

static struct {
	__typeof__(&ibv_get_device_list) get_device_list;
	__typeof__(&ibv_free_device_list) free_device_list;
	__typeof__(&ibv_get_device_name) get_device_name;
	__typeof__(&ibv_open_device) open_device;
	__typeof__(&ibv_close_device) close_device;
	__typeof__(&ibv_query_device) query_device;
	__typeof__(&ibv_query_port) query_port;
	__typeof__(&ibv_query_gid) query_gid;
	__typeof__(&ibv_query_qp) query_qp;
	__typeof__(&ibv_alloc_pd) alloc_pd;
	__typeof__(&ibv_dealloc_pd) dealloc_pd;
	__typeof__(&ibv_reg_mr) reg_mr;
	__typeof__(&ibv_reg_mr_iova2) reg_mr_iova2;
	__typeof__(&ibv_dereg_mr) dereg_mr;
	__typeof__(&ibv_create_cq) create_cq;
	__typeof__(&ibv_destroy_cq) destroy_cq;
	__typeof__(&ibv_create_qp) create_qp;
	__typeof__(&ibv_modify_qp) modify_qp;
	__typeof__(&ibv_destroy_qp) destroy_qp;
	__typeof__(&ibv_fork_init) fork_init;
	__typeof__(&ibv_event_type_str) event_type_str;
	__typeof__(&ibv_get_async_event) get_async_event;
	__typeof__(&ibv_ack_async_event) ack_async_event;
} v;

static void load(const char *path)
{
	void *handle = dlopen(path, RTLD_NOW), *before = dlsym(RTLD_DEFAULT, "ibv_get_device_list");
	if (!handle)
		fprintf(stderr, "%s\n", dlerror());
	CHECK(handle);
#define LOAD(name, version)                                                                              \
	do {                                                                                             \
		*(void **)&v.name = dlvsym(handle, "ibv_" #name, version);                               \
		if (!v.name || (void *)v.name == before) {                                               \
			fprintf(stderr, "ibv_%s is not in %s with version %s\n", #name, path, version);  \
			exit(1);                                                                         \
		}                                                                                        \
	} while (0)
	LOAD(get_device_list, "IBVERBS_1.1");
	LOAD(free_device_list, "IBVERBS_1.1");
	LOAD(get_device_name, "IBVERBS_1.1");
	LOAD(open_device, "IBVERBS_1.1");
	LOAD(close_device, "IBVERBS_1.1");
	LOAD(query_device, "IBVERBS_1.1");
	LOAD(query_port, "IBVERBS_1.1");
	LOAD(query_gid, "IBVERBS_1.1");
	LOAD(query_qp, "IBVERBS_1.1");
	LOAD(alloc_pd, "IBVERBS_1.1");
	LOAD(dealloc_pd, "IBVERBS_1.1");
	LOAD(reg_mr, "IBVERBS_1.1");
	LOAD(reg_mr_iova2, "IBVERBS_1.8");
	LOAD(dereg_mr, "IBVERBS_1.1");
	LOAD(create_cq, "IBVERBS_1.1");
	LOAD(destroy_cq, "IBVERBS_1.1");
	LOAD(create_qp, "IBVERBS_1.1");
	LOAD(modify_qp, "IBVERBS_1.1");
	LOAD(destroy_qp, "IBVERBS_1.1");
	LOAD(fork_init, "IBVERBS_1.1");
	LOAD(event_type_str, "IBVERBS_1.1");
	LOAD(get_async_event, "IBVERBS_1.1");
	LOAD(ack_async_event, "IBVERBS_1.1");
}

/* The test itself is linked to the library: a copy at another path is loaded afresh. */
static void copy_library(char *path)
{
	Dl_info info;
	char buf[65536];
	ssize_t n;
	CHECK(dladdr((void *)ibv_get_device_list, &info));
	int from = open(info.dli_fname, O_RDONLY), to = mkstemp(path);
	CHECK(from >= 0 && to >= 0);
	while ((n = read(from, buf, sizeof(buf))) > 0)
		CHECK(write(to, buf, (size_t)n) == n);
	CHECK(n == 0 && fchmod(to, 0700) == 0);
	close(from);
	close(to);
}

static void open_end(struct end *e, struct ibv_device *device)
{
	struct ibv_qp_init_attr a = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 0 } };
	e->len = 65536;
	CHECK(e->ctx = v.open_device(device));
	CHECK(e->pd = v.alloc_pd(e->ctx));
	CHECK(a.send_cq = a.recv_cq = e->cq = v.create_cq(e->ctx, 64, NULL, NULL, 0));
	CHECK(e->qp = v.create_qp(e->pd, &a));
	CHECK(posix_memalign((void **)&e->buf, 4096, e->len) == 0);
	memset(e->buf, 0, e->len);
}

static void connect_end(struct end *e, uint32_t peer)
{
	union ibv_gid gid;
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_qp_init_attr init;
	CHECK(v.query_gid(e->ctx, 1, 1, &gid) == 0);
	CHECK(v.modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
				  .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
				  .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .sgid_index = 1 } } };
	CHECK(v.modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };
	CHECK(v.modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					     IBV_QP_MAX_QP_RD_ATOMIC) == 0);
	CHECK(v.query_qp(e->qp, &a, IBV_QP_STATE, &init) == 0 && a.qp_state == IBV_QPS_RTS);
}

static void close_end(struct end *e)
{
	CHECK(v.destroy_qp(e->qp) == 0);
	CHECK(v.destroy_cq(e->cq) == 0);
	CHECK(v.dereg_mr(e->mr) == 0);
	CHECK(v.dealloc_pd(e->pd) == 0);
	CHECK(v.close_device(e->ctx) == 0);
	free(e->buf);
}

int main(void)
{
	char path[] = "/tmp/libsoftnic-XXXXXX";
	struct end e[2];
	struct ibv_device_attr attr;
	struct ibv_port_attr port;
	struct ibv_async_event event;
	int n;

	copy_library(path);
	load(path);
	unlink(path);
	CHECK(v.fork_init() == 0);
	struct ibv_device **list = v.get_device_list(&n);
	CHECK(list && n > 0 && !strcmp(v.get_device_name(list[0]), "soft0"));
	open_end(&e[0], list[0]);
	open_end(&e[1], list[0]);
	v.free_device_list(list);
	CHECK(v.query_device(e[0].ctx, &attr) == 0 && attr.max_qp > 100);
	/* the old symbol fills the struct as it was when it was new */
	memset(&port, 0, sizeof(port));
	CHECK(v.query_port(e[0].ctx, 1, (struct _compat_ibv_port_attr *)&port) == 0);
	CHECK(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET);
	CHECK(strlen(v.event_type_str(IBV_EVENT_QP_FATAL)) > 4);

	CHECK(e[0].mr = v.reg_mr(e[0].pd, e[0].buf, e[0].len, IBV_ACCESS_LOCAL_WRITE));
	CHECK(e[1].mr = v.reg_mr_iova2(e[1].pd, e[1].buf, e[1].len, (uintptr_t)e[1].buf,
				       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING));
	connect_end(&e[0], e[1].qp->qp_num);
	connect_end(&e[1], e[0].qp->qp_num);

	/* the data path is in the context, not among the symbols */
	pattern(e[0].buf, 30000, 1);
	CHECK(post_recv(&e[1], 7, 0, 20000) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 3, 0, 20000, NULL, 0) == 0);
	expect(&e[0], 3, IBV_WC_SUCCESS);
	expect(&e[1], 7, IBV_WC_SUCCESS);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 4, 20000, 10000, &e[1], 20000) == 0);
	expect(&e[0], 4, IBV_WC_SUCCESS);
	CHECK(same(e[1].buf, 30000, 1));

	/* a wrong key: the other end's queue pair hears of it, on NCCL's thread for such events */
	e[1].mr->rkey ^= 0x4400;
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 5, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 5, IBV_WC_REM_ACCESS_ERR);
	struct pollfd p = { .fd = e[1].ctx->async_fd, .events = POLLIN };
	CHECK(poll(&p, 1, 8000) == 1 && v.get_async_event(e[1].ctx, &event) == 0);
	CHECK(event.event_type == IBV_EVENT_QP_ACCESS_ERR && event.element.qp == e[1].qp);
	v.ack_async_event(&event);
	close_end(&e[0]);
	close_end(&e[1]);
	return 0;
}
