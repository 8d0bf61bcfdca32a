// BullMQ with 100 jobs at once (its speed hardly changes beyond that); ended jobs are removed, as its documentation
// recommends for throughput.
const { Queue, Worker } = require("bullmq");
const { CHUNK, mark, run } = require("./program.cjs");

run((url) => {
  const { hostname, port } = new URL(url);
  const connection = { host: hostname, port: Number(port), maxRetriesPerRequest: null };
  return {
    async prepare() {},
    async open() {
      const defaultJobOptions = { removeOnComplete: true, removeOnFail: true };
      this.queue = new Queue("bench", { connection, defaultJobOptions });
      await this.queue.waitUntilReady();
    },
    async close() {
      await this.queue.close();
    },
    async enqueue(n) {
      await this.queue.add("noop", { n });
    },
    async enqueueMany(count) {
      for (let start = 0; start < count; start += CHUNK) {
        const numbers = Array.from({ length: Math.min(CHUNK, count - start) }, (_, i) => start + i);
        await this.queue.addBulk(numbers.map((n) => ({ name: "noop", data: { n } })));
      }
    },
    async work() {
      const worker = new Worker("bench", async (job) => mark(job.data.n), { connection, concurrency: 100 });
      worker.on("error", (error) => console.error(String(error)));
      await new Promise(() => {});
    },
  };
});
