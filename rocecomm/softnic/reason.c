/* An errno says too little for a person: the last refusal of this thread in words. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "softnic.h"

static _Thread_local char text[480];

/* A stock program cannot ask for the reason. Where it came to us by LD_PRELOAD it is told on stderr what
 * the system refused, once for each kind; what the program itself asked wrongly is its own affair. */
void sn_tell(int err)
{
	static _Atomic uint64_t told;
	const char *preload = secure_getenv("LD_PRELOAD");
	if (preload && strstr(preload, "softnic") && !(atomic_fetch_or(&told, 1ULL << err) & 1ULL << err))
		fprintf(stderr, "softnic: %s\n", text);
}

static bool of_the_system(int err)
{
	switch (err) {
	case ENOSPC:
	case EROFS:
	case ENOENT:
	case EACCES:
	case EPERM:
	case ENOTDIR:
	case EBUSY:
	case EAGAIN:
	case ENOMEM:
		return true;
	default:
		return false;
	}
}

int sn_because(int err, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	if (of_the_system(err))
		sn_tell(err);
	return err;
}

/* What the last verb that failed in this thread found, and what to do; "" if nothing is known.
 * Asking forgets it. */
SN_EXPORT const char *softnic_reason(void)
{
	static _Thread_local char copy[sizeof(text)];
	memcpy(copy, text, sizeof(copy));
	text[0] = 0;
	return copy;
}
