// Graphile Worker with what it calls its fastest settings: a local queue of 500 jobs, completions in batches without delay,
// 24 jobs at once.
const { makeWorkerUtils, run: startWorker, Logger } = require("graphile-worker");
const { CHUNK, mark, run } = require("./program.cjs");

const logger = new Logger(() => () => {});

run((url) => ({
  async prepare() {
    await this.open();
    await this.client.migrate();
    await this.close();
  },
  async open() {
    this.client = await makeWorkerUtils({ connectionString: url, logger });
  },
  async close() {
    await this.client.release();
  },
  async enqueue(n) {
    await this.client.addJob("noop", { n });
  },
  async enqueueMany(count) {
    for (let start = 0; start < count; start += CHUNK) {
      const numbers = Array.from({ length: Math.min(CHUNK, count - start) }, (_, i) => start + i);
      await this.client.addJobs(numbers.map((n) => ({ identifier: "noop", payload: { n } })));
    }
  },
  async work() {
    const worker = {
      connectionString: url,
      logger,
      concurrentJobs: 24,
      maxPoolSize: 25,
      localQueue: { size: 500 },
      completeJobBatchDelay: 0,
      failJobBatchDelay: 0,
    };
    const noop = async (payload) => mark(payload.n);
    const started = await startWorker({ preset: { worker }, taskList: { noop }, noHandleSignals: true });
    await started.promise;
  },
}));
