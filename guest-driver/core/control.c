// SPDX-License-Identifier: GPL-2.0-only
/*
 * Control queue: sends requests of sync.c and pool.c one at a time, and waits for each answer in
 * process context. Readers and reclaim never wait for anything in this file. generation.c sends the
 * GENERATION requests, whose answers no task waits for.
 */
#include <linux/slab.h>

#include "control.h"

/*
 * Time after which the driver gives up a control request. With its next report, the driver sends
 * its current state, and creates and destroys the pools for which this request failed.
 */
#define CONTROL_TIMEOUT_MS	1000

/* --- requests ------------------------------------------------------------------------------ */

/* Takes the device's answers to control requests. */
void tmem_control_vq_callback(struct virtqueue *vq)
{
	struct tmem_dev *dev = vq->vdev->priv;
	struct tmem_req *req;
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&dev->control_vq_lock, flags);
	do {
		virtqueue_disable_cb(vq);
		while ((req = virtqueue_get_buf(vq, &len))) {
			tmem_req_used(&dev->control_in_flight, req, len);
			if (req->kind == TMEM_REQ_GENERATION)
				tmem_generation_answered(dev, req);
			else if (req->state == TMEM_REQ_ABANDONED)
				req->state = TMEM_REQ_FREE;
			else
				/*
				 * Complete the answer before setting the state to DONE; pairs with
				 * control_done().
				 */
				smp_store_release(&req->state, TMEM_REQ_DONE);
		}
	} while (!virtqueue_enable_cb(vq));
	spin_unlock_irqrestore(&dev->control_vq_lock, flags);
	wake_up(&dev->control_wait);
}

/*
 * Returns a control request that is not with the device, or NULL if all of them wait for an answer.
 */
struct tmem_control *tmem_control_free(struct tmem_dev *dev)
{
	unsigned int i;

	lockdep_assert_held(&dev->control_lock);
	for (i = 0; i < TMEM_CONTROL_REQUESTS; i++)
		if (READ_ONCE(dev->control[i]->req.state) == TMEM_REQ_FREE)
			return dev->control[i];
	return NULL;
}

static bool control_done(struct tmem_control *control)
{
	/* Read the answer after the state; pairs with tmem_control_vq_callback(). */
	return smp_load_acquire(&control->req.state) == TMEM_REQ_DONE;
}

/*
 * Sends a control request, whose body of @body_bytes is filled in, and waits for the answer. @pool
 * may be 0. Sleeps up to a second.
 *
 * Returns the status of the answer, 0 if the answer has none, or VIRTIO_TMEM_S_UNANSWERED if no
 * answer comes. In the last case and after STALE, the driver asks for the device's generation.
 */
u8 tmem_control_send(struct tmem_dev *dev, struct tmem_control *control, u64 generation, u16 type,
		     u32 pool, size_t body_bytes)
{
	struct scatterlist out, in, *sgs[] = { &out, &in };
	u8 status = VIRTIO_TMEM_S_UNANSWERED;
	bool notify;
	int err;

	control->out.hdr = (struct virtio_tmem_req){
		.generation = cpu_to_le64(generation),
		.type = cpu_to_le16(type),
		.pool = cpu_to_le32(pool),
	};
	control->resp.status = VIRTIO_TMEM_S_UNANSWERED;
	control->req.room_bytes = sizeof(control->resp);
	sg_init_one(&out, &control->out, sizeof(control->out.hdr) + body_bytes);
	sg_init_one(&in, &control->resp, sizeof(control->resp));

	spin_lock_irq(&dev->control_vq_lock);
	err = virtqueue_add_sgs(dev->control_vq, sgs, 1, 1, &control->req, GFP_ATOMIC);
	if (!err)
		tmem_req_sent(&dev->control_in_flight, &control->req);
	notify = !err && virtqueue_kick_prepare(dev->control_vq);
	spin_unlock_irq(&dev->control_vq_lock);
	if (notify)
		virtqueue_notify(dev->control_vq);
	if (err)
		goto unanswered;

	wait_event_timeout(dev->control_wait, control_done(control),
			   msecs_to_jiffies(CONTROL_TIMEOUT_MS));
	spin_lock_irq(&dev->control_vq_lock);
	if (control->req.state == TMEM_REQ_DONE) {
		status = 0;
		if (control->req.used_bytes >= sizeof(control->resp))
			status = READ_ONCE(control->resp.status);
		if (status == VIRTIO_TMEM_S_UNANSWERED)
			status = 0;
		control->req.state = TMEM_REQ_FREE;
	} else {
		control->req.state = TMEM_REQ_ABANDONED;
	}
	spin_unlock_irq(&dev->control_vq_lock);
	if (status == VIRTIO_TMEM_S_STALE)
		tmem_count(TMEM_STAT_stale);
unanswered:
	if (status == VIRTIO_TMEM_S_STALE || status == VIRTIO_TMEM_S_UNANSWERED)
		tmem_dev_ask(dev);
	return status;
}

/*
 * Creates or destroys a pool at the device: @type is VIRTIO_TMEM_T_POOL_CREATE or
 * VIRTIO_TMEM_T_POOL_DESTROY. @flags are those of a new pool. Sleeps up to a second.
 *
 * Returns 0; -ESTALE if the device has another generation now; -ENOSPC if a limit of the host is
 * reached; -ENOENT if there is no such pool; -EOPNOTSUPP if the device does not know a flag; -EBUSY
 * if earlier requests are not answered yet; -ETIMEDOUT if no answer comes; -EIO if the answer has
 * any other status.
 */
int tmem_control_pool(struct tmem_dev *dev, u64 generation, u16 type, u32 pool, u32 flags)
{
	struct tmem_control *control;
	u8 status = VIRTIO_TMEM_S_UNANSWERED;
	bool create = type == VIRTIO_TMEM_T_POOL_CREATE;

	mutex_lock(&dev->control_lock);
	control = tmem_control_free(dev);
	if (control) {
		control->out.create = (struct virtio_tmem_pool_create){
			.flags = cpu_to_le32(flags),
		};
		status = tmem_control_send(dev, control, generation, type, pool,
					   create ? sizeof(control->out.create) : 0);
	}
	mutex_unlock(&dev->control_lock);
	if (!control)
		return -EBUSY;
	switch (status) {
	case VIRTIO_TMEM_S_OK:
		return 0;
	case VIRTIO_TMEM_S_STALE:
		return -ESTALE;
	case VIRTIO_TMEM_S_LIMIT:
		return -ENOSPC;
	case VIRTIO_TMEM_S_NO_POOL:
		return -ENOENT;
	case VIRTIO_TMEM_S_UNSUPPORTED:
		return -EOPNOTSUPP;
	case VIRTIO_TMEM_S_UNANSWERED:
		return -ETIMEDOUT;
	default:
		return -EIO;
	}
}

/* --- set-up -------------------------------------------------------------------------------- */

/*
 * Allocates the requests of the control queue, and adds their size to dev->memory_bytes. Returns 0,
 * or -ENOMEM; the caller then calls tmem_control_exit(), too.
 */
int tmem_control_init(struct tmem_dev *dev)
{
	unsigned int i;

	mutex_init(&dev->control_lock);
	spin_lock_init(&dev->control_vq_lock);
	init_waitqueue_head(&dev->control_wait);
	for (i = 0; i < TMEM_CONTROL_REQUESTS; i++) {
		dev->control[i] = kzalloc(sizeof(*dev->control[i]), GFP_KERNEL);
		if (!dev->control[i])
			return -ENOMEM;
		dev->control[i]->req.kind = TMEM_REQ_CONTROL;
	}
	dev->memory_bytes += TMEM_CONTROL_REQUESTS * sizeof(*dev->control[0]);
	return tmem_generation_init(dev);
}

/* Frees the requests of the control queue of a device that was reset. */
void tmem_control_exit(struct tmem_dev *dev)
{
	unsigned int i;

	tmem_generation_exit(dev);
	for (i = 0; i < TMEM_CONTROL_REQUESTS; i++)
		kfree(dev->control[i]);
}
