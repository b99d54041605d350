/* An errno says too little for a person: the last refusal of this thread in words. */
#include <stdarg.h>
#include <stdio.h>

#include "softnic.h"

static _Thread_local char text[320];

int sn_because(int err, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
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
