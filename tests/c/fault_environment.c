/* ROCECOMM_SOFT_FAULT: read when a device is opened, refused there with a sentence when it cannot be
 * used; and a forked child counts for itself. */
#include <sys/wait.h>

#include "fault.h"

static struct options o;
static struct end e[2];

static void write_is(uint64_t id, enum ibv_wc_status status)
{
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, id, 0, 8, &e[1], 0) == 0);
	expect(&e[0], id, status);
}

static void third_fails(void)
{
	pair_open(e, &o);
	write_is(1, IBV_WC_SUCCESS);
	write_is(2, IBV_WC_SUCCESS);
	write_is(3, IBV_WC_GENERAL_ERR);
	pair_close(e);
}

int main(void)
{
	o = usual;
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	setenv("ROCECOMM_SOFT_FAULT", "delay:us=10;dorp:p=0.1", 1);
	CHECK(ibv_open_device(list[0]) == NULL && errno == EINVAL);
	const char *reason = softnic_reason();
	if (!strstr(reason, "ROCECOMM_SOFT_FAULT") || !strstr(reason, "\"dorp:p=0.1\""))
		fprintf(stderr, "%s\n", reason);
	CHECK(strstr(reason, "ROCECOMM_SOFT_FAULT") && strstr(reason, "\"dorp:p=0.1\""));

	setenv("ROCECOMM_SOFT_FAULT", "IBV_WC_GENERAL_ERR:after=2,times=1", 1);
	third_fails();
	third_fails(); /* everything was closed: it counts from the start */
	pair_open(e, &o);
	pid_t pid = fork();
	if (pid == 0) {
		third_fails();
		_exit(0);
	}
	int status;
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	write_is(1, IBV_WC_SUCCESS);
	write_is(2, IBV_WC_SUCCESS);
	setenv("ROCECOMM_SOFT_FAULT", "", 1);
	struct ibv_context *another = ibv_open_device(list[0]); /* it is looked at again: gone */
	CHECK(another);
	write_is(3, IBV_WC_SUCCESS);
	CHECK(ibv_close_device(another) == 0);
	pair_close(e);

	/* what is injected stays with its process */
	pair_open(e, &o);
	uint64_t id = inject(NULL, "IBV_WC_GENERAL_ERR:after=2,times=1"), m, h;
	pid = fork();
	if (pid == 0) {
		CHECK(softnic_inject_stats(id, &m, &h) == ENOENT && softnic_inject_remove(id) == ENOENT);
		CHECK(softnic_inject(e[0].ctx, "drop", &id) == EPERM);
		CHECK(softnic_port(e[0].ctx, 0) == EPERM && softnic_peer_death(e[0].qp) == EPERM &&
		      softnic_cq_overrun(e[0].cq) == EPERM);
		pair_open(e, &o);
		for (unsigned i = 0; i < 5; i++)
			write_is(i, IBV_WC_SUCCESS);
		pair_close(e);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	write_is(1, IBV_WC_SUCCESS);
	write_is(2, IBV_WC_SUCCESS);
	write_is(3, IBV_WC_GENERAL_ERR);
	uninject(id, 3, 1);
	pair_close(e);
	ibv_free_device_list(list);
	return 0;
}
