// Chromium driven by playwright-core: each line of standard input is code to run, each line of output what it returned.
//
// node browser.mjs MODULES CHROMIUM PROFILE; a line is {"code": "return page.title()", "given": ...}.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [modules, executablePath, profile] = process.argv.slice(2);
const { chromium } = createRequire(`${modules}/`)("playwright-core");
const context = await chromium.launchPersistentContext(profile, {
  executablePath,
  headless: true,
  viewport: { width: 1280, height: 900 },
  colorScheme: "light",
  args: [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
  ],
});
const page = context.pages()[0] || (await context.newPage());
page.setDefaultTimeout(20000);
const seen = { errors: [], requests: [] };
page.on("console", (message) => ["error", "warning"].includes(message.type()) && seen.errors.push(message.text()));
page.on("pageerror", (error) => seen.errors.push(String(error)));
context.on("request", (request) => seen.requests.push(request.url()));

const AsyncFunction = (async () => {}).constructor;
console.log("{}");
for await (const line of createInterface({ input: process.stdin })) {
  const { code, given } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await new AsyncFunction("page", "seen", "given", code)(page, seen, given)) ?? null };
  } catch (error) {
    answer = { error: error.stack || String(error) };
  }
  console.log(JSON.stringify(answer));
}
await context.close();
