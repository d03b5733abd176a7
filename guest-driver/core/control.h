/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Internal interface of the control queue, for control.c, which sends a request, and sync.c, which
 * fills in the body of a report.
 *
 * Callers of tmem_control_free() and tmem_control_send() hold dev->control_lock.
 */
#ifndef _TMEM_CONTROL_H
#define _TMEM_CONTROL_H

#include "core.h"

struct tmem_control {
	struct tmem_req req;
	struct {
		struct virtio_tmem_req hdr;
		union {
			struct virtio_tmem_pool_create create;
			struct virtio_tmem_report report;
			struct virtio_tmem_latencies latencies;
		};
	} out;
	struct virtio_tmem_resp resp;
};

struct tmem_control *tmem_control_free(struct tmem_dev *dev);
u8 tmem_control_send(struct tmem_dev *dev, struct tmem_control *control, u64 generation, u16 type,
		     u32 pool, size_t body_bytes);

#endif /* _TMEM_CONTROL_H */
