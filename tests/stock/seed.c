/* perftest fills both ends' buffers with rand() seeded by the second of their start, so that both hold
 * the same bytes and a transfer that never took place would look well done. Preloaded, this makes the
 * seeds differ. */
#include <stdlib.h>
#include <unistd.h>

void srand(unsigned seed)
{
	srandom(seed * 65537u + (unsigned)getpid());
}
