/* Which network a device is on. Its GIDs carry 16 bits that tell networks apart: processes of another
 * user, host, container or ROCECOMM_SOFT_DIR do not meet, but their queue pairs have the same numbers.
 * Without a look at the address, a program that is connected to one of those would talk to itself. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softnic.h"

static uint64_t mix(uint64_t h, const void *data, size_t n) /* FNV-1a */
{
	for (size_t i = 0; i < n; i++)
		h = (h ^ ((const uint8_t *)data)[i]) * 0x100000001b3ULL;
	return h;
}

/* The same for all who meet (as long as the host is up), most likely another for all others. */
uint16_t sn_network(void)
{
	static _Atomic uint32_t cached; /* bit 16 set */
	uint32_t value = atomic_load_explicit(&cached, memory_order_relaxed);
	if (value)
		return (uint16_t)value;
	struct stat st;
	char boot[64];
	uint64_t h = 0xcbf29ce484222325ULL;
	uid_t user = geteuid();
	int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, boot, sizeof(boot));
	if (fd >= 0)
		close(fd);
	h = mix(h, boot, n > 0 ? (size_t)n : 0);
	if (stat(sn_fabric_base(), &st) == 0) {
		h = mix(h, &st.st_dev, sizeof(st.st_dev));
		h = mix(h, &st.st_ino, sizeof(st.st_ino));
	}
	h = mix(h, &user, sizeof(user));
	h ^= h >> 32;
	value = (uint16_t)(h ^ h >> 16) | 0x10000u;
	atomic_store_explicit(&cached, value, memory_order_relaxed);
	return (uint16_t)value;
}

/* False: the address is one of softnic's, on another network. What else a program writes there (many
 * leave it empty) is not looked at: the QP number alone finds the peer. */
bool sn_reachable(const union ibv_gid *gid)
{
	union ibv_gid own;
	for (uint32_t i = 0; i < SN_GIDS; i++)
		if (sn_gid(0, i, &own) && memcmp(gid->raw, own.raw, 13) == 0 && gid->raw[15] < SN_NETWORK_HOSTS)
			return memcmp(gid->raw + 13, own.raw + 13, 2) == 0;
	return true;
}
