# nothing but C-level functions; see dlpack.pxd
