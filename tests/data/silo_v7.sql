PRAGMA user_version = 7;
BEGIN TRANSACTION;
CREATE TABLE approvals (
	run_id VARCHAR NOT NULL, 
	manifest_digest VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	about VARCHAR NOT NULL, 
	asked DOUBLE NOT NULL, 
	decided BOOLEAN, 
	request VARCHAR NOT NULL, 
	PRIMARY KEY (run_id, manifest_digest)
);
INSERT INTO "approvals" VALUES('waits-9e36','1fdb658c1d281fef24b68ce27220a36f583a2946dc9291c12e61dd6fb4c103b1','waits','fedavg on digits, 1 rounds, asked for by lead, without differential privacy',1.79558130166208028792e+09,1,'{"charges": {}, "classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "data": "digits", "delta": null, "epsilon": null, "extensions": [], "hospitals": 2, "lead": "lead", "method": "fedavg", "model": "digits_cnn", "parts": {"clinical": 2706, "delta": 38379, "metrics": 20}, "profile": "none", "prototypes": false, "rng": "", "rounds": 1, "start": "", "subject": "", "tensors": 22, "test_data": ""}');
INSERT INTO "approvals" VALUES('asks-ca29','85501a040a26b01afabd4ae8817c296ecf1ca13d62205ab923996857782470c6','asks','fedavg on digits, 1 rounds, asked for by lead, without differential privacy',1.79558130851984381671e+09,NULL,'{"charges": {}, "classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "data": "digits", "delta": null, "epsilon": null, "extensions": [], "hospitals": 2, "lead": "lead", "method": "fedavg", "model": "digits_cnn", "parts": {"clinical": 2706, "delta": 38379, "metrics": 20}, "profile": "none", "prototypes": false, "rng": "", "rounds": 1, "start": "", "subject": "", "tensors": 22, "test_data": ""}');
CREATE TABLE bases (
	number INTEGER NOT NULL, 
	run_id VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	PRIMARY KEY (number)
);
INSERT INTO "bases" VALUES(2,'plain-b6c1','ea8bd3ea6eebb01407c8b6e37814b24bd8fe0fde577a002392470f9ee01ee35f');
INSERT INTO "bases" VALUES(3,'plain-b6c1','b75367a588030f843ba0381efd46bb87678a1f8f9379a6315cf4585e0d80288c');
INSERT INTO "bases" VALUES(4,'personal-4bc4','01ae635b70c8422b3516167672e4b855e46933dd55849e58e9eb02fd0daddeb9');
INSERT INTO "bases" VALUES(5,'personal-4bc4','a475b1214ed1fc9508964124a6ae5f786bc42d4782e8d5011432380539137349');
INSERT INTO "bases" VALUES(7,'private-1534','66dd75d152056ad252183e1113d3b3fdb654e015bf16aae41d176c229e36bc82');
INSERT INTO "bases" VALUES(8,'private-1534','49a58078ac40fad98b9f24b276575e75cfbe28868abcad20c385bbe85bb8742a');
INSERT INTO "bases" VALUES(9,'waits-9e36','47883a3f6a340811d88ec1b418defc08ba84e897c89400abea2d3eec4c703142');
CREATE TABLE contact (
	id INTEGER NOT NULL, 
	address VARCHAR NOT NULL, 
	software VARCHAR NOT NULL, 
	since DOUBLE, 
	until DOUBLE, 
	why VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "contact" VALUES(1,'127.0.0.1:53331','consilium-fl 0.1.0+8b0009c993ff',1.79558126347719287877e+09,1.79558131092043566701e+09,'the silo was stopped');
CREATE TABLE incarnation (
	id INTEGER NOT NULL, 
	incarnation VARCHAR NOT NULL, 
	generation INTEGER NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "incarnation" VALUES(1,'8536dad95a5aaa3b6508c2d777e92cb1',1);
CREATE TABLE run_data (
	run_id VARCHAR NOT NULL, 
	fingerprint VARCHAR NOT NULL, 
	PRIMARY KEY (run_id)
);
INSERT INTO "run_data" VALUES('plain-b6c1','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc');
INSERT INTO "run_data" VALUES('personal-4bc4','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc');
INSERT INTO "run_data" VALUES('private-1534','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc');
INSERT INTO "run_data" VALUES('waits-9e36','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc');
CREATE TABLE runs (
	run_id VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	manifest_digest VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	started DOUBLE NOT NULL, 
	ended DOUBLE, 
	leaves VARCHAR NOT NULL, 
	privacy VARCHAR NOT NULL, 
	PRIMARY KEY (run_id)
);
INSERT INTO "runs" VALUES('plain-b6c1','plain','a4857f9524a5dfdb57a11af6f054da3af6efbd7b6a0bd02cd0b1cd15c73129b7','finished','',1.79558127332569503783e+09,1.79558127842847681048e+09,'{"parts": {"clinical": 2706, "delta": 38379, "metrics": 20}, "tensors": 22}','no privacy');
INSERT INTO "runs" VALUES('personal-4bc4','personal','03b11fe587f7a9c7b5868b7da2e3486ac92ec5514750cbc2065d76a8ba5df127','finished','',1.79558128054178237908e+09,1.79558128372309207913e+09,'{"parts": {"clinical": 2706, "delta": 37729, "metrics": 20, "personal": 4, "personal_ga": 4, "personal_public": 7}, "tensors": 35}','no privacy');
INSERT INTO "runs" VALUES('private-1534','private','b049a49c447b6e2fbdd65205f230432ba6f42e4b9596d70bbf9466494e62d54d','finished','',1.79558129601434493059e+09,1.79558130046302127837e+09,'{"parts": {"delta": 38379, "metrics": 20}, "tensors": 15}','no privacy: epsilon 8 at delta 1e-05 for each record, but with noise that can be repeated');
INSERT INTO "runs" VALUES('waits-9e36','waits','1fdb658c1d281fef24b68ce27220a36f583a2946dc9291c12e61dd6fb4c103b1','running','',1.79558130762618923192e+09,NULL,'{"parts": {"clinical": 2706, "delta": 38379, "metrics": 20}, "tensors": 22}','no privacy');
CREATE TABLE states (
	run_id VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	digest VARCHAR NOT NULL, 
	coordinator VARCHAR NOT NULL, 
	PRIMARY KEY (run_id, round)
);
INSERT INTO "states" VALUES('plain-b6c1',0,'dd4bab4160145737b6877947b9e9afcd5088fa84eb933187a23f9a66e5f33ad0','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "states" VALUES('plain-b6c1',1,'dd4bab4160145737b6877947b9e9afcd5088fa84eb933187a23f9a66e5f33ad0','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "states" VALUES('personal-4bc4',0,'dea4a08b9981e453d0c67db0c2cf8d95cfdbb2fd02292d64cd7570285672b1f7','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "states" VALUES('private-1534',0,'dd4bab4160145737b6877947b9e9afcd5088fa84eb933187a23f9a66e5f33ad0','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "states" VALUES('private-1534',1,'dd4bab4160145737b6877947b9e9afcd5088fa84eb933187a23f9a66e5f33ad0','a1c839debad0be5bd94155fd23e46b6d');
CREATE TABLE tasks (
	run_id VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	kind VARCHAR NOT NULL, 
	manifest_digest VARCHAR NOT NULL, 
	base_digest VARCHAR NOT NULL, 
	contribution_id VARCHAR NOT NULL, 
	object_digest VARCHAR NOT NULL, 
	size INTEGER NOT NULL, 
	state_digest VARCHAR, 
	mirrored BOOLEAN NOT NULL, 
	evaluation VARCHAR NOT NULL, 
	staged DOUBLE, 
	receipt BLOB, 
	refused VARCHAR, 
	closed DOUBLE, 
	included BOOLEAN, 
	attested VARCHAR NOT NULL, 
	coordinator VARCHAR NOT NULL, 
	PRIMARY KEY (run_id, round, kind)
);
INSERT INTO "tasks" VALUES('plain-b6c1',0,'train','a4857f9524a5dfdb57a11af6f054da3af6efbd7b6a0bd02cd0b1cd15c73129b7','47883a3f6a340811d88ec1b418defc08ba84e897c89400abea2d3eec4c703142','ca891ce023406823474297b341f9932d9118252acd3008fb5e6c83f7661f71d5','0075bbabe9640cfd01a1eafd3884bc87dadd1593d2790d0b50dfaa4da98fadcd',166820,'dd4bab4160145737b6877947b9e9afcd5088fa84eb933187a23f9a66e5f33ad0',0,'{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "correct": [23.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "examples": [36.0, 36.0, 35.0, 37.0, 36.0, 0.0, 0.0, 0.0, 0.0, 0.0], "noise": null, "clinical": {"confusion": [[23, 12, 0, 0, 0, 1, 0, 0, 0, 0], [36, 0, 0, 0, 0, 0, 0, 0, 0, 0], [35, 0, 0, 0, 0, 0, 0, 0, 0, 0], [34, 2, 0, 0, 0, 1, 0, 0, 0, 0], [35, 1, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]], "auc": [[0.057291666666666664, 0.1440972222222222], [0.14660493827160495, 0.20505401234567902], [0.3779310344827586, 0.45123152709359604], [0.2525042525042525, 0.2702702702702703], [0.3782793209876543, 0.6186342592592593], null, null, null, null, null], "bins": [[0, 0, 0.0], [4, 2, 0.5269004106521606], [176, 21, 26.53354835510254], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0]]}}',1.79558127538992428782e+09,X'0A40636138393163653032333430363832333437343239376233343166393933',NULL,1.79558127583043313025e+09,1,'["ff09b028627ef73037a5f67ff728bf7820f52eaf5f76edd80e96b114395148da", 6, "5ea687d33b8b72592b9cfde69ad17e5a9388ac6671ae490b7cb8b69347bbf1c5", "a3a1e57f3cb596b39bddad5d6f656e9b50e3299d1dc74e0dbe2a715453666c2b", 0]','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "tasks" VALUES('plain-b6c1',1,'train','a4857f9524a5dfdb57a11af6f054da3af6efbd7b6a0bd02cd0b1cd15c73129b7','ea8bd3ea6eebb01407c8b6e37814b24bd8fe0fde577a002392470f9ee01ee35f','5c4bbb2bbb806da91a58a20485f51248cf259424729737cbca9210a362b58199','ee844b7ce6df4520785c040f1c935eecba98f2d86fbbb4ee7ecad38e008a587e',166820,'dd4bab4160145737b6877947b9e9afcd5088fa84eb933187a23f9a66e5f33ad0',0,'{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "correct": [23.0, 0.0, 2.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0], "examples": [36.0, 36.0, 35.0, 37.0, 36.0, 0.0, 0.0, 0.0, 0.0, 0.0], "noise": null, "clinical": {"confusion": [[23, 0, 0, 0, 0, 0, 1, 0, 0, 12], [0, 0, 0, 0, 0, 0, 17, 1, 0, 18], [0, 0, 2, 0, 0, 0, 21, 2, 0, 10], [0, 0, 0, 0, 0, 0, 1, 0, 0, 36], [0, 0, 0, 0, 4, 0, 25, 0, 0, 7], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]], "auc": [[1.0, 1.0], [0.9388503086419753, 0.9465663580246914], [0.9927093596059113, 0.994679802955665], [0.8669438669438669, 0.8728028728028728], [0.9992283950617284, 0.9992283950617284], null, null, null, null, null], "bins": [[0, 0, 0.0], [0, 0, 0.0], [12, 1, 2.1371653079986572], [58, 7, 13.590913772583008], [67, 16, 19.634971618652344], [34, 5, 12.250847816467285], [9, 0, 3.8316915035247803], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0]]}}',1.79558127731724905973e+09,X'0A40356334626262326262623830366461393161353861323034383566353132',NULL,1.79558127758959817886e+09,1,'["ff09b028627ef73037a5f67ff728bf7820f52eaf5f76edd80e96b114395148da", 6, "5ea687d33b8b72592b9cfde69ad17e5a9388ac6671ae490b7cb8b69347bbf1c5", "cf6424ba08becebc03d5db4ef6337ca2a1c479809d50dd58c531a62a7537525a", 0]','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "tasks" VALUES('plain-b6c1',2,'evaluate','a4857f9524a5dfdb57a11af6f054da3af6efbd7b6a0bd02cd0b1cd15c73129b7','b75367a588030f843ba0381efd46bb87678a1f8f9379a6315cf4585e0d80288c','0de0f73fe55b1d2738409027af32da910dfa0aac5a77de4ee0d5537f1a9f9a03','a1471c663ab9f07c00fca7884d5251bc0001d91cdcf944a020db77b22a1af9f4',11904,NULL,0,'{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "correct": [36.0, 28.0, 35.0, 36.0, 36.0, 0.0, 0.0, 0.0, 0.0, 0.0], "examples": [36.0, 36.0, 35.0, 37.0, 36.0, 0.0, 0.0, 0.0, 0.0, 0.0], "noise": null, "clinical": {"confusion": [[36, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 28, 5, 3, 0, 0, 0, 0, 0, 0], [0, 0, 35, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 36, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 36, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]], "auc": [[1.0, 1.0], [0.9982638888888888, 0.9986496913580247], [0.9992118226600986, 1.0], [0.9992439992439992, 0.9996219996219996], [1.0, 1.0], null, null, null, null, null], "bins": [[0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [3, 1, 1.1371976137161255], [12, 9, 5.156867504119873], [15, 11, 7.543241500854492], [10, 10, 5.621955871582031], [6, 6, 3.779751777648926], [11, 11, 7.78447151184082], [14, 14, 10.803979873657227], [21, 21, 17.437040328979492], [53, 53, 47.8275032043457], [35, 35, 33.367698669433594]]}}',1.79558127797723531722e+09,X'0A40306465306637336665353562316432373338343039303237616633326461',NULL,1.79558127839125275613e+09,1,'["ff09b028627ef73037a5f67ff728bf7820f52eaf5f76edd80e96b114395148da", 6, "5ea687d33b8b72592b9cfde69ad17e5a9388ac6671ae490b7cb8b69347bbf1c5", "34e07384e0416a0f21a2f6345d94391ecae1e3dececc7651fbed4fd4332a9139", 0]','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "tasks" VALUES('personal-4bc4',0,'train','03b11fe587f7a9c7b5868b7da2e3486ac92ec5514750cbc2065d76a8ba5df127','01ae635b70c8422b3516167672e4b855e46933dd55849e58e9eb02fd0daddeb9','0bd3cb5de03f5fd0f3d52ad9e30775ee2fdab582eeca45fd37f21b2a4afd06c9','f3f6b0354869ca638e26291e4513468f2376f82493ff2edcbbdcfe1f8a616e53',165728,'dea4a08b9981e453d0c67db0c2cf8d95cfdbb2fd02292d64cd7570285672b1f7',0,'{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "correct": [23.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "examples": [36.0, 36.0, 35.0, 37.0, 36.0, 0.0, 0.0, 0.0, 0.0, 0.0], "noise": null, "clinical": {"confusion": [[23, 12, 0, 0, 0, 1, 0, 0, 0, 0], [36, 0, 0, 0, 0, 0, 0, 0, 0, 0], [35, 0, 0, 0, 0, 0, 0, 0, 0, 0], [34, 2, 0, 0, 0, 1, 0, 0, 0, 0], [35, 1, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]], "auc": [[0.057291666666666664, 0.1440972222222222], [0.14660493827160495, 0.20505401234567902], [0.3779310344827586, 0.45123152709359604], [0.2525042525042525, 0.2702702702702703], [0.3782793209876543, 0.6186342592592593], null, null, null, null, null], "bins": [[0, 0, 0.0], [4, 2, 0.5269004106521606], [176, 21, 26.53354835510254], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0]]}}',1.79558128198283767701e+09,X'0A40306264336362356465303366356664306633643532616439653330373735',NULL,1.79558128241735720639e+09,1,'["ff09b028627ef73037a5f67ff728bf7820f52eaf5f76edd80e96b114395148da", 6, "5ea687d33b8b72592b9cfde69ad17e5a9388ac6671ae490b7cb8b69347bbf1c5", "e801e09be8a843a524d5c7331eaa0059cd5d38be69ce1292a198e213443a6063", 0]','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "tasks" VALUES('personal-4bc4',1,'evaluate','03b11fe587f7a9c7b5868b7da2e3486ac92ec5514750cbc2065d76a8ba5df127','a475b1214ed1fc9508964124a6ae5f786bc42d4782e8d5011432380539137349','7056459bedc7f5a57cdfed2e008e28c782d4955d07b1829f6970db06bf852b3d','6e525b19ed24ee9c277143b43cd583c76012c65e2264e6cb2fa9cf54077cc9a3',11904,NULL,0,'{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "correct": [36.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "examples": [36.0, 36.0, 35.0, 37.0, 36.0, 0.0, 0.0, 0.0, 0.0, 0.0], "noise": null, "clinical": {"confusion": [[36, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 17, 4, 0, 15], [0, 0, 3, 0, 0, 0, 20, 7, 0, 5], [0, 0, 0, 0, 0, 0, 1, 1, 0, 35], [0, 0, 0, 0, 0, 0, 26, 2, 0, 8], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]], "auc": [[1.0, 1.0], [0.8200231481481481, 0.8358410493827161], [0.9921182266009853, 0.9934975369458128], [0.8404838404838405, 0.8595728595728596], [0.9984567901234568, 0.9990354938271605], null, null, null, null, null], "bins": [[0, 0, 0.0], [0, 0, 0.0], [40, 3, 7.175947189331055], [85, 8, 19.956451416015625], [47, 21, 13.899283409118652], [8, 7, 2.7779135704040527], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0]]}}',1.79558128306966638563e+09,X'0A40373035363435396265646337663561353763646665643265303038653238',NULL,1.79558128369698762893e+09,1,'["ff09b028627ef73037a5f67ff728bf7820f52eaf5f76edd80e96b114395148da", 6, "5ea687d33b8b72592b9cfde69ad17e5a9388ac6671ae490b7cb8b69347bbf1c5", "e6dca87ba54b17d6979f0a92195076d0fb58e7b521fec2faf3780a34466bb210", 0]','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "tasks" VALUES('private-1534',0,'train','b049a49c447b6e2fbdd65205f230432ba6f42e4b9596d70bbf9466494e62d54d','47883a3f6a340811d88ec1b418defc08ba84e897c89400abea2d3eec4c703142','dad76fbf8fb7d8dd2af74d4f1e08496d3830d1b26fd9f0fcfa118e6ffe449311','355979ce9cac8f37a232f38fdc81cc466fd1c98139a407d74ac897c284ffd254',155244,'dd4bab4160145737b6877947b9e9afcd5088fa84eb933187a23f9a66e5f33ad0',0,'{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "correct": [-9.682861328125, -60.423828125, -20.93505859375, 28.940185546875, 7.286376953125, 0.0, -23.877197265625, 23.942138671875, 0.0, 0.0], "examples": [50.845703125, 77.427490234375, 101.748291015625, 51.74853515625, 15.410888671875, 0.0, 13.87353515625, 1.384765625, 0.0, 0.0], "noise": {"std": 28.340839789956824, "draws": 1, "suppressed": true, "central": false}, "clinical": null}',1.7955812977376055718e+09,X'0A40646164373666626638666237643864643261663734643466316530383439',NULL,1.79558129822278523439e+09,1,'["ff09b028627ef73037a5f67ff728bf7820f52eaf5f76edd80e96b114395148da", 10, "f62f8bf4edbeb7bc3e700ac4089fafcc7b1d5b61885bda1ed27e9a7fad6f6222", "65fb03f2b5f9b590935ec95ab70e4a51dd341288c1716fc43504cad0f4ea1bc7", 0]','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "tasks" VALUES('private-1534',1,'train','b049a49c447b6e2fbdd65205f230432ba6f42e4b9596d70bbf9466494e62d54d','66dd75d152056ad252183e1113d3b3fdb654e015bf16aae41d176c229e36bc82','677986f867baf101a6bb8e774bb226960ad4f62b890363dc4a93fc9f176adb8e','e50252fb39876291364ff04d29461bb96f80292940e5a80c02712028f850a948',155244,'dd4bab4160145737b6877947b9e9afcd5088fa84eb933187a23f9a66e5f33ad0',0,'{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "correct": [27.584716796875, 48.510986328125, 57.844482421875, -14.448974609375, -37.985595703125, 0.0, 33.9560546875, 16.514892578125, 0.0, 0.0], "examples": [53.44189453125, 88.523193359375, 26.93310546875, 37.801513671875, 48.628662109375, 0.0, 23.0439453125, 16.07275390625, 0.0, 0.0], "noise": {"std": 28.340839789956824, "draws": 1, "suppressed": true, "central": false}, "clinical": null}',1.79558129924516892434e+09,X'0A40363737393836663836376261663130316136626238653737346262323236',NULL,1.79558129994430446625e+09,1,'["ff09b028627ef73037a5f67ff728bf7820f52eaf5f76edd80e96b114395148da", 16, "0c4972e203e33e54eacb39fffa0f9435f6468b43664ad5cf867079601b0012af", "d7cc94557ffc4cb8b3de9b34cb204ec59c7ee08be422d7c57016cdd6ace2e881", 0]','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "tasks" VALUES('private-1534',2,'evaluate','b049a49c447b6e2fbdd65205f230432ba6f42e4b9596d70bbf9466494e62d54d','49a58078ac40fad98b9f24b276575e75cfbe28868abcad20c385bbe85bb8742a','2c3c7777449bf8fabbb3eb3644dacc8c2815bbf626cc6f6a0857de41d66a3407','76c1085f78dd820faa8a97220cdaefd68522bc1f5b5ee93d9b4379f8ad6c4f07',344,NULL,0,'{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "correct": [-0.209228515625, 42.21142578125, -1.9091796875, 26.7744140625, 0.0, 0.0, 0.0, -18.5185546875, 0.0, 22.325439453125], "examples": [34.950439453125, 36.467041015625, 4.36083984375, 50.97705078125, 0.0, 0.0, 0.0, 40.80908203125, 0.0, 6.991943359375], "noise": {"std": 28.340839789956824, "draws": 1, "suppressed": true, "central": false}, "clinical": null}',1.79558130027351546282e+09,X'0A40326333633737373734343962663866616262623365623336343464616363',NULL,1.7955813004458611011e+09,1,'["ff09b028627ef73037a5f67ff728bf7820f52eaf5f76edd80e96b114395148da", 20, "164199fa306ba9a050184df5e258d39a0158576c37b8fcc6e6b09bf99e93a5a1", "92a96a69ab548a7946f2eb88359cd2d1723244077fadbdf58e10cd046c4fddf1", 0]','a1c839debad0be5bd94155fd23e46b6d');
INSERT INTO "tasks" VALUES('waits-9e36',0,'train','1fdb658c1d281fef24b68ce27220a36f583a2946dc9291c12e61dd6fb4c103b1','47883a3f6a340811d88ec1b418defc08ba84e897c89400abea2d3eec4c703142','05912ea150df77b1b3122d5a21c2c97f58d03b00dd0df53d6f824325f81efb60','0075bbabe9640cfd01a1eafd3884bc87dadd1593d2790d0b50dfaa4da98fadcd',166820,'dd4bab4160145737b6877947b9e9afcd5088fa84eb933187a23f9a66e5f33ad0',0,'{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "correct": [23.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "examples": [36.0, 36.0, 35.0, 37.0, 36.0, 0.0, 0.0, 0.0, 0.0, 0.0], "noise": null, "clinical": {"confusion": [[23, 12, 0, 0, 0, 1, 0, 0, 0, 0], [36, 0, 0, 0, 0, 0, 0, 0, 0, 0], [35, 0, 0, 0, 0, 0, 0, 0, 0, 0], [34, 2, 0, 0, 0, 1, 0, 0, 0, 0], [35, 1, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]], "auc": [[0.057291666666666664, 0.1440972222222222], [0.14660493827160495, 0.20505401234567902], [0.3779310344827586, 0.45123152709359604], [0.2525042525042525, 0.2702702702702703], [0.3782793209876543, 0.6186342592592593], null, null, null, null, null], "bins": [[0, 0, 0.0], [4, 2, 0.5269004106521606], [176, 21, 26.53354835510254], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 0.0]]}}',1.79558130798753690722e+09,X'0A40303539313265613135306466373762316233313232643561323163326339',NULL,NULL,NULL,'["c3f666c132e5955373c062c60d0f1b840b7d97223a1e0757db1a21d1cd5421ad", 21, "0e0a63cf48375b2a2703b48be2e961b4697881a34dc548c67bb47ec9fe9c9e0e", "581ccb5226836b873ebb2a4bfcbcd2c5f75f0d1bc99387f9650bef318bdfb8b0", 0]','a1c839debad0be5bd94155fd23e46b6d');
CREATE TABLE trainings (
	run_id VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	kind VARCHAR NOT NULL, 
	attempt INTEGER NOT NULL, 
	under_way BOOLEAN NOT NULL, 
	kills INTEGER NOT NULL, 
	PRIMARY KEY (run_id, round, kind)
);
CREATE TABLE unprotected (
	run_id VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	kind VARCHAR NOT NULL, 
	object_digest VARCHAR NOT NULL, 
	fingerprint VARCHAR NOT NULL, 
	splits VARCHAR, 
	PRIMARY KEY (run_id, round, kind, object_digest)
);
INSERT INTO "unprotected" VALUES('plain-b6c1',0,'train','0075bbabe9640cfd01a1eafd3884bc87dadd1593d2790d0b50dfaa4da98fadcd','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc','test,train');
INSERT INTO "unprotected" VALUES('plain-b6c1',1,'train','ee844b7ce6df4520785c040f1c935eecba98f2d86fbbb4ee7ecad38e008a587e','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc','test,train');
INSERT INTO "unprotected" VALUES('plain-b6c1',2,'evaluate','a1471c663ab9f07c00fca7884d5251bc0001d91cdcf944a020db77b22a1af9f4','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc','test');
INSERT INTO "unprotected" VALUES('personal-4bc4',0,'train','f3f6b0354869ca638e26291e4513468f2376f82493ff2edcbbdcfe1f8a616e53','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc','test,train');
INSERT INTO "unprotected" VALUES('personal-4bc4',1,'evaluate','6e525b19ed24ee9c277143b43cd583c76012c65e2264e6cb2fa9cf54077cc9a3','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc','test');
INSERT INTO "unprotected" VALUES('private-1534',0,'train','355979ce9cac8f37a232f38fdc81cc466fd1c98139a407d74ac897c284ffd254','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc','test,train');
INSERT INTO "unprotected" VALUES('private-1534',1,'train','e50252fb39876291364ff04d29461bb96f80292940e5a80c02712028f850a948','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc','test,train');
INSERT INTO "unprotected" VALUES('private-1534',2,'evaluate','76c1085f78dd820faa8a97220cdaefd68522bc1f5b5ee93d9b4379f8ad6c4f07','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc','test');
INSERT INTO "unprotected" VALUES('waits-9e36',0,'train','0075bbabe9640cfd01a1eafd3884bc87dadd1593d2790d0b50dfaa4da98fadcd','7621d8c4383664fbd6d8d3efb558ecf396a9457759c973c6dca1f9071f5a44cc','test,train');
CREATE INDEX ix_bases_run_id ON bases (run_id);
COMMIT;
