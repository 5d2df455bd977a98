// Node plays sessions of `rft serve` with the package `openai` and rewards them: node play.mjs ADDRESS
//   npm install openai
import OpenAI from "openai";

const address = process.argv[2];

async function post(path, body) {
  const headers = { Authorization: `Bearer ${process.env.RFT_SERVE_KEY}`, "Content-Type": "application/json" };
  const answer = await fetch(address + path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}

for (const stream of [false, true]) {
  const session = await post("/v1/sessions", { task_id: "greeting" });
  const model = new OpenAI({ baseURL: session.base_url, apiKey: session.api_key });
  const asked = { model: "policy", messages: [{ role: "user", content: "hi" }] };
  let said = "";
  if (stream) {
    for await (const chunk of await model.chat.completions.create({ ...asked, stream })) said += chunk.choices[0]?.delta?.content ?? "";
  } else {
    said = (await model.chat.completions.create(asked)).choices[0].message.content;
  }
  const { status } = await post(`/v1/sessions/${session.id}/reward`, { reward: 1 });
  console.log(`${stream ? "stream" : "whole"}: ${JSON.stringify(said)}, reward ${status}`);
}
