// What program.py and stopwatch.py are for Python: the same commands, the same lines on stdout, the same clock.
const readline = require("node:readline");

const monotonic = () => Number(process.hrtime.bigint()) / 1e9;
const tell = (what, n, at = monotonic()) => process.stdout.write(`${what} ${n} ${at}\n`);

let expected = 0;
let seen = 0;
function mark(n) {
  seen += 1;
  if (!expected) tell("started", n);
  else if (seen === 1) tell("first", n);
  else if (seen === expected) tell("last", n);
}

async function fill(program, count) {
  await program.open();
  const began = monotonic();
  await program.enqueueMany(count);
  tell("filled", count, monotonic() - began);
  await program.close();
}

async function produce(program) {
  await program.open();
  tell("ready", 0);
  let n = 0;
  for await (const _ of readline.createInterface({ input: process.stdin })) {
    const began = monotonic();
    await program.enqueue(n);
    tell("enqueued", n, began);
    n += 1;
  }
  await program.close();
}

async function run(makeProgram) {
  const [url, command, count] = process.argv.slice(2);
  const program = makeProgram(url);
  if (command === "prepare") await program.prepare();
  else if (command === "fill") await fill(program, Number(count));
  else if (command === "produce") await produce(program);
  else {
    expected = command === "drain" ? Number(count) : 0;
    await program.work();
  }
  process.exit(0);
}

module.exports = { run, mark, CHUNK: 1000 };
