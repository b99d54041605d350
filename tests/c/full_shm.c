/* A /dev/shm of 1 MiB: what does not fit is ENOSPC from the verb that wanted it, never a signal,
 * and what was made before works on. */
#include <sys/mount.h>
#include <sys/stat.h>

#include "pair.h"

int main(void)
{
	char dir[] = "/tmp/rocecomm-shm-XXXXXX";
	CHECK(mkdtemp(dir));
	if (mount("none", dir, "tmpfs", 0, "size=1m")) {
		rmdir(dir);
		puts("mounting a small tmpfs is not permitted here");
		return 77;
	}
	setenv("ROCECOMM_SOFT_DIR", dir, 1);
	struct options o = usual;
	struct end e[2];
	int refused = 0;
	o.len = 4096;
	o.depth = 16;
	o.cqe = 16;
	pair_open(e, &o);
	struct ibv_cq *cq[64] = { 0 };
	for (int i = 0; i < 64; i++)
		if (!(cq[i] = ibv_create_cq(e[0].ctx, 4096, NULL, NULL, 0))) {
			CHECK(errno == ENOSPC);
			refused++;
		}
	CHECK(refused > 32);
	for (int i = 0; i < 100; i++) {
		CHECK(post_recv(&e[1], 1, 0, 8) == 0 && post(&e[0], IBV_WR_SEND, 2, 0, 8, NULL, 0) == 0);
		expect(&e[0], 2, IBV_WC_SUCCESS);
		expect(&e[1], 1, IBV_WC_SUCCESS);
	}
	for (int i = 0; i < 64; i++)
		if (cq[i])
			CHECK(ibv_destroy_cq(cq[i]) == 0);
	CHECK(cq[0] = ibv_create_cq(e[0].ctx, 1024, NULL, NULL, 0)); /* the room came back */
	CHECK(ibv_destroy_cq(cq[0]) == 0);
	pair_close(e);
	char sub[128];
	struct stat st;
	snprintf(sub, sizeof(sub), "%s/rocecomm-%u", dir, (unsigned)geteuid());
	CHECK(stat(sub, &st) != 0); /* the last one out removed everything */
	CHECK(umount(dir) == 0 && rmdir(dir) == 0);
	return 0;
}
